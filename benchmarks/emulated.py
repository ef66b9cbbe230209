"""Measures the step time on emulated accelerators against the limit of the schedule, beside torch's pipelining.

48 layers that sleep (backward twice the forward, 1/M of it per micro-batch) are cut into K equal cells on K real
processes that send real messages (torch.distributed.pipelining by gloo); for interleaved_1f1b into 2K, two on each
process; for zero_bubble each half of a backward takes as long as a forward. The limit is what
`gpipe_cli.schedule.simulate` returns for the very instruction lists that run, with free messages and free bookkeeping.
torch gets the same layers in the same processes, with torch.utils.checkpoint in its stages where remat is on.

A step lasts from one moment set for all workers to the end of the last one. The exchange that ends a trainer's step
lies outside, for the engine and torch alike (benchmarks.exchange times it). One untimed step without sleeping comes
first; after that the contenders take turns. step: median of the repetitions; at best: limit over the fastest.

plain: efficiency of the plain loop, the ceiling of the emulation: all workers at the same time run the layers of their
own cells, forward and backward, by a plain loop without engine and messages; for zero_bubble with its two halves.

bubble: share of the workers' time outside forward, recompute and backward, by the engine's meter; again the median.
planned: the same by the planner's simulation, from what the plain loop takes for the layers and what a message between
two of these processes takes (`gpipe_cli.planner.measure.link`). cells: planned over measured seconds in which a worker
computes, again the median; of the worker with which it is farthest from 1.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.common import Row, parser, report
from gpipe_cli.bench.contenders import contender
from gpipe_cli.bench.emulated import emulated_workload, join_emulation, warm_up
from gpipe_cli.bench.steps import EngineStep, Step, cpu_transport, forward, plain_step
from gpipe_cli.bench.throughput import BACKWARD
from gpipe_cli.bench.timing import StopWatch, of_all_workers, take_turns, typical
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.context import Context
from gpipe_cli.metrics.trace import Recording, from_zero
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.pipeline.halves import backward_of_inputs
from gpipe_cli.planner.measure.link import LinkTimes, measure_link
from gpipe_cli.schedule.instruction import Instruction, Op
from gpipe_cli.schedule.schedule import schedule
from gpipe_cli.schedule.simulate import Timeline, cost_durations, simulate

LAYERS = 48
FREE = LinkTimes(0.0, 0.0, 0.0)
HALVES = "plain halves"
CELLS = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 1}  # of a worker, by kind of schedule
SERIAL_SECONDS = {1: 1.5, 4: 3.0, 32: 8.0}  # of forward and backward by M: long enough that sleeps exceed 1 ms
QUICK_SERIAL_SECONDS = {1: 0.5, 4: 1.0, 32: 4.0}
COLUMNS = {"K": "d", "M": "d", "remat": "", "schedule": "", "limit, s": ".3f", "step, s": ".3f", "of limit": ".3f"}
COLUMNS |= {"at best": ".3f", "plain": ".3f", "torch, s": ".3f", "torch / ours": ".3f", "bubble": ".1%"}
COLUMNS |= {"planned": ".1%", "cells": ".3f"}


@dataclass(frozen=True)
class HalvesStep:
    """Runs a plain loop whose backwards are in two halves, and times them.

    Attributes:
        seconds: of all micro-batches of the latest step, by kind of computation.
    """

    modules: Sequence[nn.Module]
    micro_batches: Sequence[MicroBatch]
    seconds: dict[Op, float] = field(default_factory=lambda: defaultdict(float))

    def __call__(self) -> None:
        self.seconds.clear()
        for micro_batch in self.micro_batches:
            start = time.perf_counter()
            loss = forward(self.modules, micro_batch)
            computed = time.perf_counter()
            weights = backward_of_inputs([loss], [torch.ones_like(loss)], micro_batch[0])
            halfway = time.perf_counter()
            weights.run()
            self.seconds[Op.FORWARD] += computed - start
            self.seconds[Op.INPUT_GRADIENT] += halfway - computed
            self.seconds[Op.WEIGHT_GRADIENT] += time.perf_counter() - halfway


def forward_seconds(serial_seconds: float, M: int) -> float:
    """Returns the seconds of one layer's forward of one micro-batch."""
    return serial_seconds / (LAYERS * M * (1 + BACKWARD))


def timeline(
    kind: str, K: int, M: int, remat: str, duration: Callable[[Instruction], float], link: LinkTimes = FREE
) -> Timeline:
    """Simulates a step of one kind of schedule."""
    placement = tuple(range(K)) * CELLS[kind]
    return simulate(schedule(kind, placement, M, remat), placement, duration, link.latency, link.host)


def even(kind: str, K: int, M: int, serial_seconds: float) -> Callable[[Instruction], float]:
    """Returns the durations of equal cells."""
    cells = K * CELLS[kind]
    return cost_durations([forward_seconds(serial_seconds, M) * LAYERS / cells] * cells, BACKWARD)


def in_halves(workers: Sequence[Mapping[str, float]], M: int) -> Callable[[Instruction], float]:
    """Returns the durations that the plain loop with two halves measured; a recompute takes as long as a forward."""
    return lambda i: workers[i.cell][(Op.FORWARD if i.op is Op.RECOMPUTE else i.op).name] / M


def kinds_on(workers: int) -> list[str]:
    """Returns the kinds of schedule; one worker has nothing to interleave and no bubble to fill."""
    return [kind for kind in CELLS if workers > 1 or kind in ("gpipe", "1f1b")]


def contenders(setting: Mapping[str, Any], rank: int, K: int) -> dict[str, Step | None]:
    """Builds the steps of the plain loops, the engine and torch; None where torch refuses."""
    seconds = [forward_seconds(setting["serial_seconds"], setting["M"])] * LAYERS
    cuts = {cells: [LAYERS // cells] * cells for cells in (K, 2 * K)}
    work = emulated_workload(seconds, cuts, setting["M"], setting["remat"], rank, K)
    steps: dict[str, Step | None] = {"plain": plain_step(work.layers(K, rank), work.micro_batches)}
    if "zero_bubble" in kinds_on(K):  # the first cell's input needs no gradient, as in the pipeline
        inputs = [((rows.clone().requires_grad_(rank > 0),), (rows,)) for (rows,), _ in work.micro_batches]
        steps[HALVES] = HalvesStep(work.layers(K, rank, divisible=True), inputs)
    for kind in kinds_on(K):
        steps[kind] = contender(kind, work)
        if kind != "zero_bubble":
            steps[f"torch {kind}"] = contender(f"torch {kind}", work)
    return steps


def worker(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Measures messages and all settings.

    Returns:
        `LinkTimes` as ``link``; for each of ``settings`` the result of `measure`.
    """
    watch = join_emulation(context, config["realtime"])
    rank, K = context.rank, context.world_size
    transport = cpu_transport(tuple(range(K)))
    link = None if transport is None else measure_link(transport, rank)
    settings = [measure(setting, config, watch, rank, K) for setting in config["settings"]]
    return {"link": tuple(link or FREE), "settings": settings}


def measure(
    setting: Mapping[str, Any], config: Mapping[str, Any], watch: StopWatch, rank: int, K: int
) -> dict[str, Any]:
    """Returns the seconds, bubbles and busy seconds of each contender's steps, and those of the loop in two halves."""
    steps = contenders(setting, rank, K)
    running = {name: step for name, step in steps.items() if step is not None}
    bubbles: dict[str, list[float]] = defaultdict(list)
    busy: dict[str, list[list[float]]] = defaultdict(list)

    def timed(name: str, step: Step) -> float:
        seconds = watch.time(step)
        if isinstance(step, EngineStep):
            measured = measured_timeline(step, K)
            bubbles[name].append(measured.bubble)
            busy[name].append(measured.busy)
        return seconds

    warm_up(running.values(), watch)
    seconds = take_turns({name: partial(timed, name, step) for name, step in running.items()}, config["repetitions"])
    loop = steps.get(HALVES)
    halves = {op.name: spent for op, spent in loop.seconds.items()} if isinstance(loop, HalvesStep) else {}
    return {"seconds": seconds, "bubbles": bubbles, "busy": busy, HALVES: of_all_workers(halves, K)}


def measured_timeline(step: EngineStep, K: int) -> Timeline:
    """Returns the timeline of the latest step, from the meters of all workers."""
    everyone = of_all_workers(Recording(step.engine.meter.spans, []).as_json(), K)
    recordings = from_zero([Recording.from_json(rows) for rows in everyone])
    return Timeline([recording.spans for recording in recordings], tuple(range(K)))


def farthest(planned: Sequence[float], measured: Sequence[Sequence[float]]) -> float:
    """Returns planned over measured seconds (the median of some steps) of the worker that is farthest from 1."""
    pairs = zip(planned, zip(*measured, strict=True), strict=True)
    shares: list[float] = [plan / statistics.median(steps) for plan, steps in pairs]
    return max(shares, key=lambda share: max(share, 1 / share))


def rows_of(K: int, setting: Mapping[str, Any], link: LinkTimes, found: Mapping[str, Any]) -> Iterator[Row]:
    """Makes one row per kind of schedule."""
    seconds: dict[str, Any] = {name: typical(steps) for name, steps in found["seconds"].items()}
    M, remat, serial = setting["M"], setting["remat"], setting["serial_seconds"]
    for kind in kinds_on(K):
        plain = seconds[HALVES if kind == "zero_bubble" else "plain"]
        expected = in_halves(found[HALVES], M) if kind == "zero_bubble" else even(kind, K, M, plain * K)
        limit = timeline(kind, K, M, remat, even(kind, K, M, serial)).span
        plan = timeline(kind, K, M, remat, expected, link)
        step, other = seconds[kind], seconds.get(f"torch {kind}")
        yield {
            "K": K,
            "M": M,
            "remat": remat,
            "schedule": kind,
            "limit, s": limit,
            "step, s": step,
            "of limit": limit / step,
            "at best": limit / min(found["seconds"][kind]),
            "plain": serial / K / plain,
            "torch, s": other,
            "torch / ours": None if other is None else other / step,
            "bubble": typical(found["bubbles"][kind]),
            "planned": plan.bubble,
            "cells": farthest(plan.busy, found["busy"][kind]),
        }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--K", type=int, nargs="+", default=[1, 2, 4, 8], help="divisors of 48 (default: 1 2 4 8)")
    options.add_argument("--M", type=int, nargs="+", default=[1, 4, 32], help="default: 1 4 32")
    options.add_argument("--repetitions", type=int, default=3, help="timed steps of each contender (default: 3)")
    options.add_argument("--seconds", type=float, help="serial work per step; default: 1.5, 3, 8 s for M = 1, 4, 32")
    options.add_argument("--realtime", action="store_true", help="go before the machine's other work (Linux, as root)")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions = 1
    serial = QUICK_SERIAL_SECONDS if arguments.quick else SERIAL_SECONDS
    settings = [
        {"M": M, "remat": remat, "serial_seconds": arguments.seconds or serial.get(M, 8.0)}
        for M in arguments.M
        for remat in ("never", "except_last")
    ]
    config = {"settings": settings, "repetitions": arguments.repetitions, "realtime": arguments.realtime}
    links: dict[int, LinkTimes] = {}

    def rows() -> Iterator[Row]:
        for K in arguments.K:
            answer = run_workers("benchmarks.emulated:worker", K, config, ("torch.distributed.pipelining",))
            links[K] = LinkTimes(*answer["link"])
            for setting, found in zip(settings, answer["settings"], strict=True):
                yield from rows_of(K, setting, links[K], found)

    report(COLUMNS, rows(), arguments.output, lambda rows: [*notes(rows), *link_notes(links)])


def notes(rows: Sequence[Row]) -> list[str]:
    worst = min(rows, key=lambda row: row["of limit"])
    beside = [row["torch / ours"] for row in rows if row["torch / ours"] is not None]
    near = [row for row in rows if abs(row["bubble"] - row["planned"]) < 0.02]
    timed = [row for row in rows if abs(row["cells"] - 1) < 0.1]
    return [
        f"lowest share of the limit: {worst['of limit']:.3f} at K={worst['K']} M={worst['M']} "
        f"remat={worst['remat']} {worst['schedule']}",
        f"faster than torch.distributed.pipelining in {sum(q >= 1 for q in beside)} of {len(beside)} rows",
        f"planned bubble within 2 points of the measured one in {len(near)} of {len(rows)} rows",
        f"planned cell times within 10 % of the measured ones in {len(timed)} of {len(rows)} rows",
    ]


def link_notes(links: Mapping[int, LinkTimes]) -> list[str]:
    return [
        f"messages between {K} workers: {1e3 * link.host:.2f} ms of a worker's time for a send or a receive, "
        f"{1e3 * link.latency:.2f} ms on the way, {link.rate / 1e9:.1f} GB/s"
        for K, link in links.items()
        if K > 1
    ]


if __name__ == "__main__":
    main()
