"""Measures what keeping some graphs gains over recomputing all of them, in the same memory, on emulated accelerators.

64 layers that sleep, as in `benchmarks.emulated`, their costs equal or drawn between 0.5 and 1.5. Their graphs are as
large as their forwards take long; memory is counted in graphs of one worker's share of the model, W of which the first
worker keeps under 1f1b without recompute. Every worker may keep one half or three quarters of what that one keeps
there. Only graphs count, a recomputed one included; inputs and messages are left out.

"always" recomputes every graph. "keep" keeps of each cell as many as fit at the worst moment of its worker's list: of
the last cells first, because their graphs are needed again soonest. Of all kinds of schedule, interleaved_1f1b with 2
and 4 cells on each worker, each takes the one whose simulated step is shortest. Both run in the same processes, in
turns. gain: step of "always" / step of "keep" - 1. The file has the numbers kept of each cell, too.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.common import Row, parser, report
from gpipe_cli.bench.throughput import BACKWARD, measure
from gpipe_cli.partition.partition import cell_costs, partition
from gpipe_cli.schedule.schedule import most_kept, schedule
from gpipe_cli.schedule.simulate import cost_durations, simulate

LAYERS = 64
KINDS = (("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4))
POLICIES = ("always", "keep")
BOTH = {"schedule": "", "limit, s": ".3f", "step, s": ".3f"}
COLUMNS = {"W": "d", "costs": "", "memory": ".2f"}
COLUMNS |= {f"{policy}: {title}": format_ for policy in POLICIES for title, format_ in BOTH.items()}
COLUMNS |= {"gain simulated": ".1%", "gain": ".1%"}


class Choice(NamedTuple):
    """Holds a schedule with the seconds of its simulated step, and the most graphs of a worker in such seconds."""

    limit: float
    kind: str
    cuts: list[int]
    keep: list[int]
    graphs: float


def choose(kind: str, cells: int, seconds: Sequence[float], W: int, M: int, memory: float, most: int) -> Choice | None:
    """Chooses how many graphs each cell keeps; None where not even one of each fits.

    Args:
        cells: on each worker.
        seconds: of each layer's forward.
        memory: of a worker, in seconds of the forwards whose graphs fit.
        most: graphs of a cell; 0: all are recomputed.
    """
    placement = tuple(range(W)) * cells
    cuts = partition(seconds, len(placement), "min_max")
    costs, keep = cell_costs(seconds, cuts), [0] * len(placement)
    for first in range(len(placement) - W, -1, -W):  # of W cells, one on each worker
        for number in range(1, most + 1):
            lists = schedule(kind, placement, M, [*keep[:first], *[number] * W, *keep[first + W :]])
            for worker, instructions in enumerate(lists):
                if most_kept(instructions, costs).together <= memory * (1 + 1e-9):
                    keep[first + worker] = number
    lists = schedule(kind, placement, M, keep)
    graphs = max(most_kept(instructions, costs).together for instructions in lists)
    limit = simulate(lists, placement, cost_durations(costs, BACKWARD)).span
    return Choice(limit, kind, cuts, keep, graphs) if graphs <= memory * (1 + 1e-9) else None


def choices(seconds: Sequence[float], W: int, M: int, memory: float) -> list[Choice]:
    """Returns the best schedule of each policy."""
    return [
        min(filter(None, (choose(kind, cells, seconds, W, M, memory, most) for kind, cells in KINDS)))
        for most in (0, M)
    ]


def setting(seconds: Sequence[float], M: int, chosen: Sequence[Choice]) -> dict[str, Any]:
    """Returns what the workers of gpipe-bench measure."""
    contenders = {p: (c.kind, c.cuts, c.keep) for p, c in zip(POLICIES, chosen, strict=True)}
    return {"seconds": seconds, "M": M, "contenders": contenders, "link": None}


def rows(arguments: Namespace) -> Iterator[Row]:
    """Measures with one set of processes for each W; makes one row for each limit of memory."""
    M, drawn = arguments.M, random.Random(0)
    costs = {"equal": [1.0] * LAYERS, "drawn": [drawn.uniform(0.5, 1.5) for _ in range(LAYERS)]}
    for W in arguments.workers:
        graph = (0.5 if arguments.quick else arguments.seconds) / (1 + BACKWARD) / M  # forward of a worker's share
        layers = {name: [cost / sum(each) * W * graph for cost in each] for name, each in costs.items()}
        memory = {name: W * cell_costs(each, partition(each, W, "min_max"))[0] for name, each in layers.items()}
        cases = [(name, share * memory[name]) for name in layers for share in arguments.shares]
        chosen = [choices(layers[name], W, M, most) for name, most in cases]
        settings = [setting(layers[name], M, pair) for (name, _), pair in zip(cases, chosen, strict=True)]
        repetitions = 1 if arguments.quick else arguments.repetitions
        answers = measure(settings, W, repetitions, arguments.realtime)
        for (name, most), pair, found in zip(cases, chosen, answers, strict=True):
            row: Row = {"W": W, "costs": name, "memory": most / graph, "keep": pair[1].keep}
            steps = [found["seconds"][policy] for policy in POLICIES]
            for policy, choice, step in zip(POLICIES, pair, steps, strict=True):
                figures = zip(BOTH, (f"{choice.kind}, {len(choice.cuts) // W}", choice.limit, step), strict=True)
                row |= {f"{policy}: {title}": figure for title, figure in figures}
            yield row | {"gain simulated": pair[0].limit / pair[1].limit - 1, "gain": steps[0] / steps[1] - 1}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[4, 8], help="divisors of 16 (default: 4 8)")
    options.add_argument("--M", type=int, default=32, help="default: 32")
    options.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.75], help="of memory (default: 0.5 0.75)")
    options.add_argument("--repetitions", type=int, default=3, help="timed steps of each policy (default: 3)")
    options.add_argument("--seconds", type=float, default=6.0, help="work of each worker per step (default: 6)")
    options.add_argument("--realtime", action="store_true", help="go before the machine's other work (Linux, as root)")
    arguments = options.parse_args()
    report(COLUMNS, rows(arguments), arguments.output)


if __name__ == "__main__":
    main()
