"""Measures how good the pipeline is that a search chooses.

gaps: by how many per cent the answer's step is longer than what no schedule can undercut, of its cut and of any, for
random models on random described devices, with memory between the least of all pipelines and what one that recomputes
nothing needs.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from benchmarks.common import Row, parser, report
from gpipe_cli.commands.plan import make_request
from gpipe_cli.data.source import Batch, Source
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.partition.cutter import MARGIN
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.planner import Planner
from gpipe_cli.planner.search import Search, candidates
from gpipe_cli.schedule.instruction import Op

FREE = ("K", "schedule", "partition", "remat", "workers")
BOUNDS = {"cut": "bound_seconds", "any cut": "bound_of_any_cut_seconds"}
FIGURES = ("median", "90th", "worst")
GAPS = {"answer": "", "cases": "d"} | {f"{bound}, {figure}": ".1f" for bound in BOUNDS for figure in FIGURES}


def linears(widths: Sequence[int]) -> list[LayerBuilder]:
    """Returns linear layers between such widths."""
    return [LayerBuilder(f"layer_{n}", partial(nn.Linear, *pair)) for n, pair in enumerate(pairwise(widths))]


class Zeros(Source):
    """Yields the same mini-batch for ever."""

    def __init__(self, batch_size: int, inputs: int, outputs: int) -> None:
        self._examples, self._widths = batch_size, (inputs, outputs)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        while True:
            x, y = (torch.zeros(self._examples // M // replicas, width) for width in self._widths)
            yield Batch([((x,), (y,))] * M, 0)

    def evaluation(self, M: int) -> Iterator[Batch]:
        return iter(())


def drawn(draw: random.Random, free: bool) -> Planner:
    """Returns a planner of a random model on a random device, with ``free`` messages or such that take time."""
    widths = [round(2 ** draw.uniform(5, 10)) for _ in range(draw.randint(7, 21))]
    M, flops = draw.randint(4, 16), 10 ** draw.uniform(11, 13)
    rates = {"flops": flops, "bandwidth": flops / draw.uniform(5, 50), "link": flops / draw.uniform(20, 200)}
    rates |= {"memory": 1e15} | ({"link": 1e18, "latency": 0} if free else {})
    figures = ", ".join(f"{name}: {rate:.4g}" for name, rate in rates.items())
    words = ["model._target_=benchmarks.chosen.linears", f"model.widths={widths}", f"plan.device={{{figures}}}"]
    words += [f"pipeline.M={M}", f"data.batch_size={M * round(2 ** draw.uniform(8, 13))}"]
    words += ["data._target_=benchmarks.chosen.Zeros", f"data.inputs={widths[0]}", f"data.outputs={widths[-1]}"]
    request = make_request([*words, "task._target_=torch.nn.functional.mse_loss"])
    return Planner(request.settings, request.options)


def answers(cases: int, free: bool = False) -> Iterator[Plan]:
    """Yields the plans that searches find, each in memory between the least that fits and the most that graphs need."""
    for case in range(cases):
        draw = random.Random(f"0 {case}")
        planner, devices = drawn(draw, free), draw.randint(2, 4)
        tried = list(candidates(planner, FREE, devices))
        whole = [planner.plan(section).memory for section in tried]
        least = min(*whole, *(planner.plan(replace(section, remat="always")).memory for section in tried))
        memory = 1 + round(draw.uniform((1 + MARGIN) * least, draw.choice(whole)))
        planner.options = replace(planner.options, memory=memory)
        yield Search(planner, FREE).fastest(devices)


def recomputes(plan: Plan) -> bool:
    return any(i.op is Op.RECOMPUTE for instructions in plan.lists for i in instructions)


def gaps(plans: Sequence[Plan]) -> Iterator[Row]:
    """Makes a row of the answers that recompute and one of those that do not: gaps in per cent."""
    for what, forced in {"nothing is recomputed": False, "memory forces recompute": True}.items():
        row: Row = {"answer": what, "cases": sum(recomputes(plan) == forced for plan in plans)}
        for bound, field in BOUNDS.items():
            found = [100 * (p.step_seconds / getattr(p, field) - 1) for p in plans if recomputes(p) == forced]
            if len(found) > 1:
                shown = median(found), quantiles(found, n=10, method="inclusive")[-1], max(found)
                row |= {f"{bound}, {figure}": value for figure, value in zip(FIGURES, shown, strict=True)}
        yield row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("part", choices=["gaps"])
    options.add_argument("--cases", type=int, default=100, help="models (default: 100)")
    options.add_argument("--free", action="store_true", help="messages take no time, as in the bounds")
    given = options.parse_args()
    report(GAPS, gaps(list(answers(4 if given.quick else given.cases, given.free))), given.output)


if __name__ == "__main__":
    main()
