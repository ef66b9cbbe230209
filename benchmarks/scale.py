"""Measures what grows with the number of workers W, by processes that compute nothing, and extrapolates to 4,096.

Every process joins gloo over a store that counts, as under torchrun, and exchanges as many numbers as a step's report
has. On a few cores W processes share, so seconds of a whole exchange show the work of all of them; on a cluster each
has cores of its own, and what counts is the longest chain of messages. So the last table takes the seconds of a hop
from pairs, with as many numbers as W workers exchange.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from math import ceil, log2
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Row, parser, report
from gpipe_cli.distributed.batch_plan import BatchPlanCodec, BatchShape
from gpipe_cli.distributed.exchange import Exchange, Tree, all_gather_json
from gpipe_cli.distributed.world import World
from gpipe_cli.metrics.step_report import StepReporter
from gpipe_cli.pipeline.engine import TASK

SIZES = (2, 8, 16, 32, 64, 128, 256)
FAR = (16, 256, 4096)  # workers of the last table
ROUNDS = 31
PATIENCE = timedelta(seconds=120)
COLUMNS = {"workers": ",", "exchange, ms": ".2f", "rank 0's CPU, ms": ".2f"}
COLUMNS |= {"store MB, all at once": ".3f", "store MB": ".3f"}


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--most", type=int, default=256, metavar="W", help="the largest number of processes")
    arguments = line.parse_args()
    torch.set_num_threads(1)
    most = min(arguments.most, 16) if arguments.quick else arguments.most
    report(COLUMNS, measured([size for size in SIZES if size <= most]), arguments.output, extrapolated)


def measured(sizes: Sequence[int]) -> Iterator[Row]:
    """Yields the figures of each number of processes."""
    for size in sizes:
        at_once = run_processes(size, "0", lambda rank, size: {})["store MB"]
        yield {"workers": size, "store MB, all at once": at_once, **run_processes(size, "1", exchange)}


def exchange(rank: int, size: int) -> Row:
    """Returns the milliseconds of an exchange over the tree, and rank 0's share on its core."""
    tree = Tree(dist.group.WORLD, 1)

    def timed_for(workers: int) -> tuple[float, float, float]:
        return timed(partial(tree.add_up, torch.zeros(numbers(workers), dtype=torch.float64)), tree)

    wall, busy, _ = timed_for(size)
    hops = {f"hop {far}": timed_for(far)[2] / 2 for far in FAR} if size == 2 else {}
    return {"exchange, ms": wall, "rank 0's CPU, ms": busy, **hops}


def of_step(workers: int) -> tuple[StepReporter, Exchange]:
    """Returns reporter and exchange of a step: at most 128 cells, M=512, two inputs, 3,000 parameters."""
    K, cpu = min(workers, 128), torch.device("cpu")
    world = World(0, K, workers // K, cpu, cpu, None, None, None)
    codec = BatchPlanCodec(BatchShape((2,), (2,)), 512, 0, world.replicas)
    pipeline: Any = SimpleNamespace(world=world, codec=codec, placement=range(K))
    reporter = StepReporter(pipeline, [TASK], parameters=3000, statistics=2)
    return reporter, Exchange({**codec.fields(), **reporter.fields()}, None)


def numbers(workers: int) -> int:
    """Returns how many numbers a step exchanges."""
    return sum(len(field) for field in of_step(workers)[1].own.values())


def bookkeeping(workers: int) -> float:
    """Returns the milliseconds in which rank 0 writes the plan of a step, and reads plan and report."""
    reporter, exchange = of_step(workers)
    codec, batch = reporter.pipeline.codec, [((torch.zeros(4, 9),), (torch.zeros(4, 9),))] * 512

    def keep_books() -> None:
        codec.write(exchange, batch, [1.0] * 512)
        exchange.run()
        codec.read(exchange, "train")
        reporter.read(exchange, 1.0)

    return timed(keep_books, Tree(None, 0))[2]


def timed(act: Callable[[], object], tree: Tree) -> tuple[float, float, float]:
    """Returns milliseconds by the clock and of this process's threads, both medians, and the least by the clock."""
    walls, busy = [], []
    for _ in range(ROUNDS + 1):
        tree.add_up(torch.zeros(1))
        began, used = time.perf_counter(), time.process_time()
        act()
        walls.append(1e3 * (time.perf_counter() - began))
        busy.append(1e3 * (time.process_time() - used))
    return statistics.median(walls[1:]), statistics.median(busy[1:]), min(walls[1:])


class CountingStore(dist.Store):
    """Passes everything on to another store, and counts the bytes."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self.bytes = store, 0

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        self.bytes += len(key) + len(value)

    def get(self, key: str) -> Any:
        value = self._store.get(key)
        self.bytes += len(key) + len(value)
        return value

    def wait(self, keys: list[str], timeout: timedelta = PATIENCE) -> None:
        self._store.wait(keys, timeout)
        self.bytes += sum(map(len, keys))


def run_processes(size: int, on_demand: str, work: Callable[[int, int], Row]) -> Row:
    """Forks so many processes, which join gloo and do ``work``; returns rank 0's figures and the store's megabytes."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = on_demand
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fork = get_context("fork")
    results = fork.SimpleQueue()
    started = [fork.Process(target=_join, args=(rank, size, port, results, work)) for rank in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    if failed := sum(process.exitcode != 0 for process in started):
        raise RuntimeError(f"{failed} of {size} processes failed")
    found: Row = results.get()
    return found


def _join(rank: int, size: int, port: int, results: Any, work: Callable[[int, int], Row]) -> None:
    store = CountingStore(dist.TCPStore("127.0.0.1", port, size, rank == 0, PATIENCE))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    Tree(dist.group.WORLD, 1).add_up(torch.zeros(1))
    found = {"store MB": sum(all_gather_json(store.bytes, dist.group.WORLD)) / 1e6, **work(rank, size)}
    all_gather_json(None, dist.group.WORLD)
    if rank == 0:
        results.put(found)


def extrapolated(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of the table at `FAR` workers."""
    pair, W, gigabytes = rows[0], rows[-1]["workers"], rows[-1]["store MB, all at once"] / 1e3
    terms: list[tuple[str, Callable[[int], float], str]] = [
        ("exchange over the tree, s", lambda w: 2 * ceil(log2(w)) * pair[f"hop {w}"] / 1e3, "2·log₂W × hop of a pair"),
        ("joining, all at once: store GB", lambda w: gigabytes * (w / W) ** 3, f"W³, from {W}"),
        ("bookkeeping of rank 0 in a step, ms", bookkeeping, "measured, without the lines of logging.every"),
    ]
    lines = [f"| term | {' | '.join(f'{far:,}' for far in FAR)} | how |", "|---|" + "---|" * (len(FAR) + 1)]
    return lines + [f"| {name} | {' | '.join(f'{at(far):,.4g}' for far in FAR)} | {how} |" for name, at, how in terms]


if __name__ == "__main__":
    main()
