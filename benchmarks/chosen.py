"""Measures how good the pipeline is that a search chooses.

gaps: by how many per cent the answer's step is longer than what no schedule can undercut, of its cut and of any, for
random models on random described devices, with memory between the least of all pipelines and what one that recomputes
nothing needs.
runs: on this machine, two workers, gpipe-train with pipeline=auto, with the defaults and with pipelines typed by hand,
drawn from a grid, in turns; a step is the least of the rounds' medians.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from benchmarks.common import Row, parser, report, run_command
from benchmarks.plan import MODELS, RUN, WARM_UP
from gpipe_cli.commands.plan import make_request
from gpipe_cli.commands.plan_report import words_of
from gpipe_cli.data.source import Batch, Source
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.planner import Planner
from gpipe_cli.planner.search.candidates import candidates
from gpipe_cli.planner.search.search import Search

FREE = ("K", "schedule", "partition", "remat", "workers")
BOUNDS = {"cut": "bound_seconds", "any cut": "bound_of_any_cut_seconds"}
FIGURES = ("median", "90th", "worst")
GAPS = {"answer": "", "cases": "d"} | {f"{bound}, {figure}": ".1f" for bound in BOUNDS for figure in FIGURES}
REAL = {"amoebanet": MODELS["amoebanet"], "transformer": (), "resnet18": MODELS["traced"]}
STEPS = {"model": "", "chosen": "", "its step, s": ".3f", "defaults": ".3f", "best typed": "", "its step": ".3f"}
STEPS |= {"chosen / best typed": ".3f"}


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


def answers(cases: int, free: bool = False, seed: int = 0) -> Iterator[Plan]:
    """Yields what searches find: each in memory between the least that fits and what all graphs need."""
    for case in range(cases):
        draw = random.Random(f"{seed} {case}")
        planner, devices = drawn(draw, free), draw.randint(2, 4)
        tried = list(candidates(planner.settings.pipeline, FREE, devices, len(planner.builders), ()))
        whole = [planner.plan(section).memory for section in tried]
        least = min(*whole, *(planner.plan(replace(section, remat="always")).memory for section in tried))
        planner.options = replace(planner.options, memory=1 + round(draw.uniform(least, draw.choice(whole))))
        yield Search(planner, FREE).fastest(devices)


def gaps(plans: Sequence[Plan]) -> Iterator[Row]:
    """Makes a row of the answers that recompute and one of those that do not: gaps in per cent."""
    for what, forced in {"nothing is recomputed": False, "memory forces recompute": True}.items():
        row: Row = {"answer": what, "cases": sum((plan.recomputed > 0) == forced for plan in plans)}
        for bound, field in BOUNDS.items():
            found = [100 * (p.step_seconds / getattr(p, field) - 1) for p in plans if (p.recomputed > 0) == forced]
            if len(found) > 1:
                shown = median(found), quantiles(found, n=10, method="inclusive")[-1], max(found)
                row |= {f"{bound}, {figure}": value for figure, value in zip(FIGURES, shown, strict=True)}
        yield row


def typed(number: int, seed: int) -> list[tuple[str, ...]]:
    """Returns the words of so many pipelines that a person might type for two workers."""
    kinds = [(K, kind) for K in (2, 4) for kind in ("gpipe", "1f1b", "zero_bubble")] + [(4, "interleaved_1f1b")]
    keys = product(kinds, ("always", "except_last", "never"))
    grid = [(f"pipeline.K={K}", f"pipeline.schedule={kind}", f"pipeline.remat={word}") for (K, kind), word in keys]
    return random.Random(seed).sample(grid, min(number, len(grid)))


def step(words: Sequence[str], steps: int) -> tuple[float, str]:
    """Runs gpipe-train; returns the median seconds of a step after the first ones, and the keys that it chose."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        run_command("gpipe-train", [*words, *RUN, f"trainer.steps={WARM_UP + steps}", f"hydra.run.dir={directory}"])
        lines = (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        chosen = Path(directory) / ".hydra" / "chosen.yaml"
        keys = words_of(dict(OmegaConf.load(chosen))) if chosen.exists() else ""
    return median(json.loads(line)["seconds"] for line in lines[WARM_UP:]), keys


def runs(model: str, pipelines: Sequence[Sequence[str]], steps: int, rounds: int) -> Row:
    """Makes the row of a model: pipeline=auto, the defaults and the typed pipelines, in turns."""
    contenders = [("pipeline=auto",), (), *pipelines]
    taken = [[step([*REAL[model], *words], steps) for words in contenders] for _ in range(rounds)]
    chosen, defaults, *others = [min(seconds for seconds, _ in each) for each in zip(*taken, strict=True)]
    best = min(others)
    keys = " or ".join(dict.fromkeys(each[0][1] for each in taken)).replace("pipeline.", "")
    row: Row = {"model": model, "chosen": keys, "its step, s": chosen, "defaults": defaults, "its step": best}
    row["best typed"] = " ".join(pipelines[others.index(best)]).replace("pipeline.", "")
    return {**row, "chosen / best typed": chosen / best, "taken": taken}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("part", choices=["gaps", "runs"])
    options.add_argument("--cases", type=int, default=100, help="of gaps (default: 100)")
    options.add_argument("--free", action="store_true", help="messages of gaps take no time, as in the bounds")
    options.add_argument("--typed", type=int, default=8, help="pipelines typed by hand, of 21 (default: 8)")
    options.add_argument("--steps", type=int, default=15, help="timed steps of each run (default: 15)")
    options.add_argument("--rounds", type=int, default=2, help="of runs (default: 2)")
    options.add_argument("--models", nargs="+", choices=REAL, default=list(REAL), help="of runs; default: all")
    options.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    given = options.parse_args()
    if given.quick:
        given.cases, given.typed, given.steps, given.rounds, given.models = 4, 1, 2, 1, given.models[:1]
    if given.part == "gaps":
        report(GAPS, gaps(list(answers(given.cases, given.free, given.seed))), given.output)
    else:
        pipelines = typed(given.typed, given.seed)
        report(STEPS, (runs(model, pipelines, given.steps, given.rounds) for model in given.models), given.output)


if __name__ == "__main__":
    main()
