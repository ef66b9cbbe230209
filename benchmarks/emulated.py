"""Step time on emulated accelerators against the limit of the schedule, beside torch.distributed.pipelining.

48 layers that sleep (backward twice the forward, 1/M of it per micro-batch) are cut into K equal cells on K real
processes that send real messages (the peers by gloo); for interleaved_1f1b into 2K, two on each process; for
zero_bubble each half of a backward takes as long as a forward. The limit is what `gpipe_cli.schedule.simulate` gives
for the very lists of instructions that run, with free messages and free bookkeeping. The peers get the same layers in
the same processes, with torch.utils.checkpoint in their stages where remat is on.

A step lasts from one moment set for all workers to the end of the last one. The exchange that ends a trainer's step
lies outside, for the engine and the peers alike (benchmarks.exchange times it). One untimed step without sleeping comes
first; after that the contenders take turns, and the median of the repetitions is shown; at best: of the fastest.

plain: efficiency of the plain loop, the ceiling of the emulation: all workers at the same time run the layers of their
own cells, forward and backward, by a plain loop without engine and messages; for zero_bubble with its two halves.

bubble: share of the workers' time outside forward, recompute and backward, by the engine's meter; again the median.
planned: the same by the planner's simulation, from what the plain loop takes for the layers and what a message between
two of these processes takes (`gpipe_cli.planner.measure.link`). cells: what the plan has a worker compute over what the
meter says, again the median; of the worker with which it is farthest from 1.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.common import Report, parser
from gpipe_cli.bench.driver import EngineStep, HalvesStep, Step, cpu_transport, engine_step, plain_step
from gpipe_cli.bench.emulator import BACKWARD, LAYERS, WIDTH, SleepingLayer, forward_seconds
from gpipe_cli.bench.peers import Work, torch_step
from gpipe_cli.bench.stopwatch import StopWatch
from gpipe_cli.bench.turns import join_emulation, of_all_workers, take_turns, typical
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.context import Context
from gpipe_cli.metrics.trace import Recording, from_zero
from gpipe_cli.planner.measure.link import LinkTimes, measure_link
from gpipe_cli.schedule.instruction import Instruction, Op
from gpipe_cli.schedule.schedule import schedule
from gpipe_cli.schedule.simulate import Timeline, cost_durations, simulate

EXAMPLES = 64
FREE = LinkTimes(0.0, 0.0, 0.0)
HALVES = "plain halves"
CELLS = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 1}  # of a worker, by kind of schedule
SERIAL_SECONDS = {1: 1.5, 4: 3.0, 32: 8.0}  # of forward and backward by M: long enough that sleeps exceed 1 ms
QUICK_SERIAL_SECONDS = {1: 0.5, 4: 1.0, 32: 4.0}


def timeline(
    kind: str, K: int, M: int, remat: str, duration: Callable[[Instruction], float], link: LinkTimes = FREE
) -> Timeline:
    """The step of one kind of schedule, with cells that take so long."""
    placement = tuple(range(K)) * CELLS[kind]
    return simulate(schedule(kind, placement, M, remat), placement, duration, link.latency, link.host)


def even(kind: str, K: int, M: int, serial_seconds: float) -> Callable[[Instruction], float]:
    """All cells alike, backward as much longer as the layers' sleep: by itself the limit."""
    cells = K * CELLS[kind]
    return cost_durations([forward_seconds(serial_seconds, M) * LAYERS / cells] * cells, BACKWARD)


def in_halves(workers: Sequence[Mapping[str, float]], M: int) -> Callable[[Instruction], float]:
    """As the plain loop with two halves took them, on each worker; a forward once more takes as long as the first."""
    return lambda i: workers[i.cell][(Op.FORWARD if i.op is Op.RECOMPUTE else i.op).name] / M


def kinds_on(workers: int) -> list[str]:
    """One worker has nothing to interleave and no bubble to fill."""
    return [kind for kind in CELLS if workers > 1 or kind in ("gpipe", "1f1b")]


def contenders(
    rank: int, K: int, M: int, remat: str, serial_seconds: float, shared_memory: bool
) -> dict[str, Step | None]:
    batch = torch.zeros(EXAMPLES, WIDTH)

    def layers(divisible: bool = False) -> list[nn.Module]:
        return [SleepingLayer(forward_seconds(serial_seconds, M), divisible) for _ in range(LAYERS // K)]

    micro_batches = [((rows,), (rows,)) for rows in batch.tensor_split(M)]
    steps: dict[str, Step | None] = {"plain": plain_step(layers(), micro_batches)}
    if "zero_bubble" in kinds_on(K):  # the first cell's input needs no gradient, as in the pipeline
        asked = [((rows.clone().requires_grad_(rank > 0),), (rows,)) for (rows,), _ in micro_batches]
        steps[HALVES] = HalvesStep(layers(divisible=True), asked)
    for kind in kinds_on(K):
        mine = layers(divisible=kind == "zero_bubble")
        steps[kind] = engine_step(
            mine, rank, K, micro_batches, kind, remat, cells_here=CELLS[kind], shared_memory=shared_memory
        )
        steps[f"torch {kind}"] = peer(kind, layers(), remat != "never", rank, K, M, Work(batch, batch))
    return steps


def peer(kind: str, layers: list[nn.Module], remat: bool, rank: int, K: int, M: int, work: Work) -> Step | None:
    """torch.distributed.pipelining's schedule of the same kind, where it has one and takes this M."""
    if kind == "zero_bubble":
        return None
    size = len(layers) // CELLS[kind]
    chunks = [layers[first : first + size] for first in range(0, len(layers), size)]
    return torch_step(kind, chunks, remat, rank, K, M, work)


def worker(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Entry point: `LinkTimes` as ``link``; for each of ``settings`` the seconds and bubbles of each contender's steps,
    and of each worker the seconds of a plain loop with two halves."""
    watch = join_emulation(context, config["realtime"])
    rank, K = context.rank, context.world_size
    transport = cpu_transport(tuple(range(K)), not config["gloo"])
    link = None if transport is None else measure_link(transport, rank)
    settings = [measure(setting, config, watch, rank, K) for setting in config["settings"]]
    return {"link": tuple(link or FREE), "settings": settings}


def measure(
    setting: Mapping[str, Any], config: Mapping[str, Any], watch: StopWatch, rank: int, K: int
) -> dict[str, Any]:
    """The steps of all contenders in one setting."""
    M, remat, serial = setting["M"], setting["remat"], setting["serial_seconds"]
    steps = contenders(rank, K, M, remat, serial, not config["gloo"])
    bubbles: dict[str, list[float]] = defaultdict(list)
    busy: dict[str, list[list[float]]] = defaultdict(list)

    def look(name: str) -> None:
        if isinstance(step := steps[name], EngineStep):
            measured = measured_timeline(step, K)
            bubbles[name].append(measured.bubble)
            busy[name].append(measured.busy)

    seconds = take_turns(steps, config["repetitions"], watch, look)
    loop = steps.get(HALVES)
    halves = loop.seconds if isinstance(loop, HalvesStep) else {}
    by_name = {op.name: spent for op, spent in halves.items()}
    return {"seconds": seconds, "bubbles": bubbles, "busy": busy, HALVES: of_all_workers(by_name, K)}


def measured_timeline(step: EngineStep, K: int) -> Timeline:
    """Of the step just taken, by the meters of all workers."""
    recordings = from_zero([Recording(spans, []) for spans in of_all_workers(step.engine.meter.spans, K)])
    return Timeline([recording.spans for recording in recordings], tuple(range(K)))


def farthest(planned: Sequence[float], measured: Sequence[Sequence[float]]) -> float:
    """Of the workers' planned / measured seconds, medians of some steps, the one that is farthest from 1."""
    shares: list[float] = [
        plan / statistics.median(steps) for plan, steps in zip(planned, zip(*measured, strict=True), strict=True)
    ]
    return max(shares, key=lambda share: max(share, 1 / share))


def rows_of(K: int, setting: Mapping[str, Any], link: LinkTimes, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    seconds: dict[str, Any] = {name: typical(steps) for name, steps in found["seconds"].items()}
    M, remat, serial = setting["M"], setting["remat"], setting["serial_seconds"]
    for kind in kinds_on(K):
        plain = seconds[HALVES if kind == "zero_bubble" else "plain"]
        expected = in_halves(found[HALVES], M) if kind == "zero_bubble" else even(kind, K, M, plain * K)
        limit = timeline(kind, K, M, remat, even(kind, K, M, serial)).span
        plan = timeline(kind, K, M, remat, expected, link)
        step, other = seconds[kind], seconds[f"torch {kind}"]
        rows.append(
            {
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
        )
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--K", type=int, nargs="+", default=[1, 2, 4, 8], help="divisors of 48 (default: 1 2 4 8)")
    options.add_argument("--M", type=int, nargs="+", default=[1, 4, 32], help="default: 1 4 32")
    options.add_argument("--repetitions", type=int, default=3, help="timed steps of each contender (default: 3)")
    options.add_argument("--seconds", type=float, help="serial work per step; default: 1.5, 3, 8 s for M = 1, 4, 32")
    options.add_argument("--realtime", action="store_true", help="shut out the machine's other work (Linux, as root)")
    options.add_argument("--gloo", action="store_true", help="our messages by gloo, too, as the peers' are")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions = 1
    serial = QUICK_SERIAL_SECONDS if arguments.quick else SERIAL_SECONDS
    settings = [
        {"M": M, "remat": remat, "serial_seconds": arguments.seconds or serial.get(M, 8.0)}
        for M in arguments.M
        for remat in ("never", "except_last")
    ]
    report = Report(
        {"K": "d", "M": "d", "remat": "", "schedule": "", "limit, s": ".3f", "step, s": ".3f", "of limit": ".3f"}
        | {
            "at best": ".3f",
            "plain": ".3f",
            "torch, s": ".3f",
            "torch / ours": ".3f",
            "bubble": ".1%",
            "planned": ".1%",
            "cells": ".3f",
        }
    )
    report.begin()
    links = {}
    config = {"settings": settings, "repetitions": arguments.repetitions, "realtime": arguments.realtime}
    config["gloo"] = arguments.gloo
    for K in arguments.K:
        answer = run_workers("benchmarks.emulated:worker", K, config, ("torch.distributed.pipelining",))
        links[K] = LinkTimes(*answer["link"])
        for setting, found in zip(settings, answer["settings"], strict=True):
            for row in rows_of(K, setting, links[K], found):
                report.add(row)
    worst = min(report.rows, key=lambda row: row["of limit"])
    beside = [row for row in report.rows if row["torch / ours"] is not None]
    slower = [row for row in beside if row["torch / ours"] < 1]
    near = [row for row in report.rows if abs(row["bubble"] - row["planned"]) < 0.02]
    timed = [row for row in report.rows if abs(row["cells"] - 1) < 0.1]
    report.end(
        arguments.output,
        [
            f"lowest share of the limit: {worst['of limit']:.3f} at K={worst['K']} M={worst['M']} "
            f"remat={worst['remat']} {worst['schedule']}",
            f"faster than torch.distributed.pipelining in {len(beside) - len(slower)} of {len(beside)} rows",
            f"planned bubble within 2 points of the measured one in {len(near)} of {len(report.rows)} rows",
            f"planned cell times within 10 % of the measured ones in {len(timed)} of {len(report.rows)} rows",
            *(
                f"messages between {K} workers: {1e3 * link.host:.2f} ms of a worker's time for a send or a receive, "
                f"{1e3 * link.latency:.2f} ms on the way, {link.rate / 1e9:.1f} GB/s"
                for K, link in links.items()
                if K > 1
            ),
        ],
    )


if __name__ == "__main__":
    main()
