"""Measures what grows with the number of workers W, by processes that compute next to nothing; extrapolates to 4,096.

Every process starts as gpipe-train does under torchrun (gloo, over a store that counts): it cuts a model of a small
layer for each worker, builds its cell, and all agree on the parts. Then they exchange as many numbers as a step's
report has. On a few cores W processes share, so seconds show the work of all of them; on a cluster each has cores of
its own, and what counts is the longest chain of messages. So the last table takes the seconds of a hop from pairs, with
as many numbers as W workers exchange.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from math import ceil, log2
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from benchmarks.chosen import linears
from benchmarks.common import Row, parser, report
from gpipe_cli.config import Settings
from gpipe_cli.distributed import exchange
from gpipe_cli.distributed.batch_plan import BatchPlanCodec, BatchShape
from gpipe_cli.distributed.exchange import Exchange, Tree, all_gather_json
from gpipe_cli.distributed.world import World
from gpipe_cli.factory.build import build_task
from gpipe_cli.jobs.configuration import composed, plain
from gpipe_cli.launch.context import Context
from gpipe_cli.metrics.journal import Notices
from gpipe_cli.metrics.step_report import StepReporter
from gpipe_cli.partition.cut import cut_model
from gpipe_cli.pipeline.engine import TASK
from gpipe_cli.schedule.posting import post_when_sent
from gpipe_cli.schedule.schedule import kept_graphs, schedule
from gpipe_cli.trainer.assembly import assemble_model, start_worker
from gpipe_cli.trainer.training_assembly import assemble_training, require_equal_replicas

SIZES = (2, 8, 16, 32, 64, 128, 256)
FAR = (16, 256, 4096)  # workers of the last table
MOST_CELLS, M = 128, 512  # of a pipeline in the last table; further workers are replicas
ROUNDS = 31
PATIENCE = timedelta(seconds=600)
WIDTH = 4
MODEL_BYTES = 72e9  # weights and Adam's state of the paper's 6 billion parameters
DISK = 1e9  # bytes a second
COLUMNS = {"workers": ",", "start, s": ".1f", "rank 0's CPU, s": ".2f", "meetings": "d", "messages of rank 0": "d"}
COLUMNS |= {"told, KB": ".1f", "store, KB": ".1f", "exchange, ms": ".2f", "rank 0's CPU in it, ms": ".2f"}


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--most", type=int, default=256, metavar="W", help="the largest number of processes")
    arguments = line.parse_args()
    torch.set_num_threads(1)
    most = min(arguments.most, 16) if arguments.quick else arguments.most
    rows = (run_processes(size) for size in SIZES if size <= most)
    report(COLUMNS, rows, arguments.output, extrapolated)


def configuration(workers: int) -> Row:
    """Returns the configuration of a run with one small layer for each worker."""
    model = ["model._target_=benchmarks.chosen.linears", f"model.widths={[WIDTH] * (workers + 1)}"]
    data = ["data._target_=benchmarks.chosen.Zeros", f"data.inputs={WIDTH}", f"data.outputs={WIDTH}"]
    pipeline = [f"pipeline.K={workers}", f"pipeline.workers={workers}", "pipeline.M=4", "pipeline.cost=flops"]
    loss, device = "task._target_=torch.nn.functional.mse_loss", "pipeline.device=cpu"
    return plain(composed("train", [*model, *data, *pipeline, loss, device, "data.batch_size=8"]))


def start(context: Context, config: Row) -> World:
    """Starts a worker as `gpipe_cli.trainer.run` does, up to the first step; returns the world that it has joined."""
    settings, journal = Settings.from_config(config), Notices(context.emit, False)
    world = start_worker(context, settings)
    assembly = assemble_model(context, settings, world, build_task(settings.task, settings.seed), journal)
    assemble_training(context, {"settings": config}, assembly, journal, None)
    require_equal_replicas(assembly.pipeline)
    return world


def exchange_of_step(size: int) -> Row:
    """Returns the milliseconds of an exchange over the tree, and rank 0's share on its core."""
    tree = Tree(dist.group.WORLD, 1)

    def timed_for(workers: int) -> tuple[float, float, float]:
        return timed(partial(tree.add_up, torch.zeros(numbers(workers), dtype=torch.float64)), tree)

    wall, busy, _ = timed_for(size)
    hops = {f"hop {far}": timed_for(far)[2] / 2 for far in FAR} if size == 2 else {}
    return {"exchange, ms": wall, "rank 0's CPU in it, ms": busy, **hops}


def of_step(workers: int) -> tuple[StepReporter, Exchange]:
    """Returns reporter and exchange of a step: at most `MOST_CELLS` cells, M=512, two inputs, 3,000 parameters."""
    K, cpu = min(workers, MOST_CELLS), torch.device("cpu")
    world = World(0, K, workers // K, cpu, cpu, None, None, None)
    codec = BatchPlanCodec(BatchShape((2,), (2,)), M, 0, world.replicas)
    pipeline: Any = SimpleNamespace(world=world, codec=codec, placement=range(K))
    reporter = StepReporter(pipeline, [TASK], parameters=3000, statistics=2)
    return reporter, Exchange({**codec.fields(), **reporter.fields()}, None)


def numbers(workers: int) -> int:
    """Returns how many numbers a step exchanges."""
    return sum(len(field) for field in of_step(workers)[1].own.values())


def bookkeeping(workers: int) -> float:
    """Returns the milliseconds in which rank 0 writes the plan of a step, and reads plan and report."""
    reporter, exchange = of_step(workers)
    codec, batch = reporter.pipeline.codec, [((torch.zeros(4, 9),), (torch.zeros(4, 9),))] * M

    def keep_books() -> None:
        codec.write(exchange, batch, [1.0] * M)
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


class CountingTree(Tree):
    """Counts in ``counted`` what this rank takes part in and sends, where values are told or gathered."""

    counted: ClassVar[Row] = {"meetings": 0, "messages of rank 0": 0, "told, KB": 0.0}

    def gather(self, own: bytes) -> bytes:
        self.counted["meetings"] += 1
        return super().gather(own)

    def spread(self, content: bytes) -> bytes:
        self.counted["meetings"] += 1
        told = super().spread(content)
        self.counted["told, KB"] += len(told) / 1e3
        return told

    def _send(self, tensors: list[torch.Tensor], ranks: list[int], *timeout: timedelta) -> None:
        self.counted["messages of rank 0"] += len(tensors) * len(ranks)
        super()._send(tensors, ranks, *timeout)


def run_processes(size: int) -> Row:
    """Forks so many processes, which start a run and then exchange; returns the row, as rank 0 sees it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fork, config = get_context("fork"), configuration(size)
    results = fork.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="gpipe-scale-") as folder:
        arguments = (size, port, Path(folder), config, results)
        started = [fork.Process(target=_worker, args=(rank, *arguments)) for rank in range(size)]
        for process in started:
            process.start()
        for process in started:
            process.join()
    if failed := sum(process.exitcode != 0 for process in started):
        raise RuntimeError(f"{failed} of {size} processes failed")
    found: Row = results.get()
    return found


def _worker(rank: int, size: int, port: int, folder: Path, config: Row, results: Any) -> None:
    exchange.Tree = CountingTree  # type: ignore[misc]  # in this process alone
    store = CountingStore(dist.TCPStore("127.0.0.1", port, size, rank == 0, PATIENCE))
    began, used = time.perf_counter(), time.process_time()
    context = Context(rank, size, rank, folder, lambda: store, emit=lambda event: None, stop_requested=exchange.never)
    world = start(context, config)
    row: Row = {"workers": size, "start, s": time.perf_counter() - began, "rank 0's CPU, s": time.process_time() - used}
    row |= CountingTree.counted
    row["store, KB"] = sum(all_gather_json(store.bytes, world.all_ranks)) / 1e3
    row |= exchange_of_step(size)
    all_gather_json(None, world.all_ranks)
    if rank == 0:
        results.put(row)


@cache
def seconds_of_start(K: int) -> tuple[float, float, float]:
    """Returns the seconds in which rank 0 cuts K layers, a worker lists all instructions, and times its receives."""
    config = Settings.from_config(configuration(K)).pipeline
    example = ((torch.zeros(2, WIDTH),), (torch.zeros(2, WIDTH),))
    moments = [time.perf_counter()]
    cut_model(linears([WIDTH] * (K + 1)), config, K, example)
    moments.append(time.perf_counter())
    lists = schedule("1f1b", range(K), M, kept_graphs("except_last", K, M))
    moments.append(time.perf_counter())
    post_when_sent(lists)
    moments.append(time.perf_counter())
    cut, listed, posted = (after - before for before, after in pairwise(moments))
    return cut, listed, posted


def extrapolated(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of the table at `FAR` workers."""
    pair, last = rows[0], rows[-1]
    W, meetings = last["workers"], last["meetings"]

    def chain(workers: int) -> float:
        return float(ceil(log2(workers)) * pair[f"hop {workers}"] / 1e3)

    def alone(workers: int) -> tuple[float, float, float]:
        return seconds_of_start(min(workers, MOST_CELLS))

    terms: list[tuple[str, Callable[[int], float], str]] = [
        ("exchange of a step, s", lambda w: 2 * chain(w), "2 log₂W hops"),
        ("rank 0's bookkeeping of a step, ms", bookkeeping, "measured, without the lines of logging.every"),
        ("start: values told and gathered, s", lambda w: 2 * meetings * chain(w), f"{meetings} times 2 log₂W hops"),
        ("start: told to each worker, KB", lambda w: last["told, KB"] * w / W, f"W, from {W}: a line a layer"),
        ("start: all workers' traffic at the store, KB", lambda w: last["store, KB"] * w / W, f"W, from {W}"),
        ("start: connections of a worker", lambda w: ceil(log2(w)) + 2, "log₂W and two neighbours, at most"),
        ("start: rank 0 cuts, s", lambda w: alone(w)[0], "measured, a layer for each cell"),
        ("start: each lists instructions, s", lambda w: alone(w)[1], f"measured, M={M}"),
        ("start: each times its receives (NCCL), s", lambda w: alone(w)[2], f"measured, M={M}"),
        ("checkpoint: each writes or reads, s", lambda w: MODEL_BYTES / w / DISK, "72 GB / W at 1 GB/s"),
    ]
    lines = [f"| term | {' | '.join(f'{far:,}' for far in FAR)} | how |", "|---|" + "---|" * (len(FAR) + 1)]
    return lines + [f"| {name} | {' | '.join(f'{at(far):,.3g}' for far in FAR)} | {how} |" for name, at, how in terms]


if __name__ == "__main__":
    main()
