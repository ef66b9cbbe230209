"""Measures what grows with the number of workers W, by processes that compute nothing, and extrapolates to 4,096.

    python -m benchmarks.scale [--most 256]

Every process joins gloo over a store that counts, as under torchrun, and exchanges as many numbers as a step's report
has. On a few cores W processes share, so seconds of a whole exchange show the work of all of them; on a cluster each
has cores of its own, and what counts is the busiest worker and the longest chain of messages. So the last table takes
from pairs, with as many numbers as W workers exchange, rank 0's processor seconds and the seconds of a hop.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from math import ceil, log2
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

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
LARGE_MODEL, DISK = 72e9, 1e9  # bytes of the 6-billion model with Adam's state; bytes a second of a worker
COLUMNS = {
    "workers": ",",
    "store MB, all at once": ".3f",
    "joined s, all at once": ".2f",
    "store operations": ",",
    "store MB": ".3f",
    "joined s": ".2f",
    "connections": "",
    "star ms": ".2f",
    "tree ms": ".2f",
    "rank 0's CPU ms, star": ".2f",
    "rank 0's CPU ms, tree": ".2f",
}


def main() -> int:
    line = parser(__doc__)
    line.add_argument("--most", type=int, default=256, metavar="W", help="the largest number of processes")
    arguments = line.parse_args()
    torch.set_num_threads(1)
    most = min(arguments.most, 16) if arguments.quick else arguments.most
    report(COLUMNS, measured([size for size in SIZES if size <= most]), arguments.output, extrapolated)
    return 0


def measured(sizes: list[int]) -> Iterator[Row]:
    """Yields the figures of each number of processes."""
    for size in sizes:
        at_once = run_processes(size, on_demand=False, work=lambda rank, size: {})
        at_once = {f"{name}, all at once": value for name, value in at_once.items()}
        yield {"workers": size, **at_once, **run_processes(size, on_demand=True, work=exchange)}


def exchange(rank: int, size: int) -> Row:
    """Returns the seconds of an exchange, rank 0's share of them on its core, and the connections of the tree."""
    tree, group = Tree(dist.group.WORLD, 1), cast(dist.ProcessGroup, dist.group.WORLD)
    vector = torch.zeros(numbers(size), dtype=torch.float64)
    by_tree = timed(lambda: tree.add_up(vector), tree)
    found = {"connections": connections(), "tree ms": by_tree[0], "rank 0's CPU ms, tree": by_tree[1]}
    by_star = timed(lambda: through_rank_0(vector, group), tree)
    found |= {"star ms": by_star[0], "rank 0's CPU ms, star": by_star[1]}
    for far in FAR if size == 2 else ():
        large = torch.zeros(numbers(far), dtype=torch.float64)
        *_, fastest = timed(partial(tree.add_up, large), tree)
        _, busy, _ = timed(partial(through_rank_0, large, group), tree)
        found |= {f"hop {far}": fastest / 2, f"busy {far}": busy}
    return found


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


def through_rank_0(vector: Tensor, group: dist.ProcessGroup) -> None:
    """Adds up as gpipe-cli did before the tree."""
    total, others = vector.clone(), range(1, group.size())
    if group.rank():
        dist.send(vector, 0, group=group, tag=2)
        dist.recv(total, 0, group=group, tag=3)
        return
    shares = [torch.empty_like(vector) for _ in others]
    arriving = [dist.irecv(share, r, group=group, tag=2) for r, share in zip(others, shares, strict=True)]
    for work, share in zip(arriving, shares, strict=True):
        cast(dist.Work, work).wait()
        total += share
    for work in [dist.isend(total, r, group=group, tag=3) for r in others]:
        cast(dist.Work, work).wait()


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


def connections() -> int:
    """Returns the sockets of this process."""
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(path.readlink()).startswith("socket") for path in paths)


# -- processes ---------------------------------------------------------------------------------------------------------


class CountingStore(dist.Store):
    """Passes everything on to another store, and counts it."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self.operations, self.bytes = store, 0, 0

    def _counted(self, value: Any, *passed: Any) -> Any:
        self.operations += 1
        self.bytes += sum(len(part) for part in passed if isinstance(part, str | bytes))
        self.bytes += len(value) if isinstance(value, bytes) else 8
        return value

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        self._counted(None, key, value)

    def get(self, key: str) -> Any:
        return self._counted(self._store.get(key), key)

    def wait(self, keys: list[str], timeout: timedelta = PATIENCE) -> None:
        self._store.wait(keys, timeout)
        self._counted(None, *keys)


def run_processes(size: int, on_demand: bool, work: Callable[[int, int], Row]) -> Row:
    """Forks so many processes, which join gloo and do ``work``; returns rank 0's figures and those of joining."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(on_demand))
    with TemporaryFile() as results, ExitStack() as closing:
        ports, tell = os.pipe()
        closing.callback(os.close, ports)
        closing.callback(os.close, tell)
        started = [_fork(rank, size, ports, results.fileno(), work) for rank in range(size)]
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # has threads: after the forks
        os.write(tell, b"%05d" % server.port * size)
        codes = [os.waitpid(process, 0)[1] for process in started]
        if any(codes):
            raise RuntimeError(f"{sum(map(bool, codes))} of {size} processes failed")
        results.seek(0)
        found: Row = json.loads(results.read())
        return found


def _fork(rank: int, size: int, ports: int, results: int, work: Callable[[int, int], Row]) -> int:
    if process := os.fork():
        return process
    code = 1
    try:
        store = CountingStore(dist.TCPStore("127.0.0.1", int(os.read(ports, 5)), timeout=PATIENCE))
        began = time.perf_counter()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
        Tree(dist.group.WORLD, 1).add_up(torch.zeros(1))
        mine = [time.perf_counter() - began, store.operations, store.bytes]
        joined, operations, passed = zip(*all_gather_json(mine, dist.group.WORLD), strict=True)
        found = {"joined s": max(joined), "store operations": sum(operations), "store MB": sum(passed) / 1e6}
        found |= work(rank, size)
        all_gather_json(None, dist.group.WORLD)
        if rank == 0:
            os.write(results, json.dumps(found).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


# -- the table ---------------------------------------------------------------------------------------------------------


def extrapolated(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of the table at `FAR` workers."""
    pair, W = rows[0], rows[-1]["workers"]
    gigabytes, seconds = rows[-1]["store MB, all at once"] / 1e3, rows[-1]["joined s"]
    terms: list[tuple[str, Callable[[int], float], str]] = [
        ("exchange through rank 0, s", lambda w: (w - 1) * pair[f"busy {w}"] / 1e3, "(W-1) × CPU of a pair's rank 0"),
        ("exchange over the tree, s", lambda w: 2 * ceil(log2(w)) * pair[f"hop {w}"] / 1e3, "2·log₂W × hop of a pair"),
        ("joining, all at once: store GB", lambda w: gigabytes * (w / W) ** 3, f"W³, from {W}"),
        ("joining on demand: store operations", lambda w: 5 * w - 4, "W addresses, 4 for each edge of the tree"),
        ("joining on demand: s", lambda w: seconds * w / W, f"W, from {W} on these cores"),
        ("connections of rank 0", lambda w: ceil(log2(w)) + 2, "log₂W + 2, and neighbours in the pipeline"),
        ("bookkeeping of rank 0 in a step, ms", bookkeeping, "measured, without the lines of logging.every"),
        ("checkpoint of 72 GB: s a worker writes", lambda w: LARGE_MODEL / min(w, 128) / DISK, "those of replica 0"),
    ]
    lines = [f"| term | {' | '.join(f'{far:,}' for far in FAR)} | how |", "|---|" + "---|" * (len(FAR) + 1)]
    return lines + [f"| {name} | {' | '.join(f'{at(far):,.4g}' for far in FAR)} | {how} |" for name, at, how in terms]


if __name__ == "__main__":
    sys.exit(main())
