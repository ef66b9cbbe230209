"""Measures how good the pipeline is that a search chooses.

gaps: by how many per cent the answer's step is longer than what no schedule can undercut, of its cut and of any, for
random models on random described devices, with memory between the least of all pipelines and what one that recomputes
nothing needs.
real: on this machine, what pipeline=auto chooses (by three searches, each with measurements of its own), the defaults,
pipelines typed by hand, and torch.distributed.pipelining's. Two workers with one thread each run forward and backward
of the same layers on M micro-batches of the usual shapes, all contenders in turns; without the update. All typed ones
are cut as a run cuts them; torch gets such cuts into two and four stages, and four equal ones for ZBV, and recomputes
nothing. Seconds are medians of the rounds, of the three choices the largest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from benchmarks.common import WARM_UP, Row, parser, report
from benchmarks.plan import MODELS
from gpipe_cli.bench.contenders import contender
from gpipe_cli.bench.emulated import Workload
from gpipe_cli.bench.steps import CPU
from gpipe_cli.bench.throughput import TORCH
from gpipe_cli.bench.timing import StopWatch, take_turns
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.commands.plan import make_request
from gpipe_cli.config import PipelineConfig, Settings
from gpipe_cli.data.source import Batch, Source
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.build import build_model, build_task
from gpipe_cli.factory.example import example_micro_batch, with_example
from gpipe_cli.launch.context import Context
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.partition.cutter import MARGIN
from gpipe_cli.pipeline.cell import build_layer
from gpipe_cli.planner.options import Options
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.planner import Planner
from gpipe_cli.planner.search import Search, candidates

FREE = ("K", "schedule", "partition", "remat", "workers")
BOUNDS = {"cut": "bound_seconds", "any cut": "bound_of_any_cut_seconds"}
FIGURES = ("median", "90th", "worst")
GAPS = {"answer": "", "cases": "d"} | {f"{bound}, {figure}": ".1f" for bound in BOUNDS for figure in FIGURES}
REAL = {"amoebanet": MODELS["amoebanet"], "transformer": (), "language model": MODELS["transformer_lm_small"]}
REAL |= {"resnet18": MODELS["traced"]}
NOT_BY_TORCH = ("transformer",)  # its stages pass on ids, and torch tries each stage on memory as it is found
STEPS = {"model": "", "chosen": "", "its step, s": ".3f", "defaults": ".3f", "best typed": "", "its step": ".3f"}
STEPS |= {"chosen / best typed": ".3f", "torch's best": "", "torch / chosen": ".3f"}
W, CHOICES = 2, 3  # workers, and searches
TORCH_CUTS = {"1f1b": "K=2 schedule=1f1b remat=never", "interleaved": "K=4 schedule=interleaved_1f1b remat=never"}


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
        tried = list(candidates(planner.settings.pipeline, FREE, devices, len(planner.builders), ()))
        whole = [planner.plan(section).memory for section in tried]
        least = min(*whole, *(planner.plan(replace(section, remat="always")).memory for section in tried))
        planner.options = replace(
            planner.options, memory=1 + round(draw.uniform((1 + MARGIN) * least, draw.choice(whole)))
        )
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


def typed(pipeline: PipelineConfig) -> dict[str, PipelineConfig]:
    """Returns pipelines that a person might type for two workers, by their words."""
    kinds = [*product((2, 4, 8), ("gpipe", "1f1b", "zero_bubble")), (4, "interleaved_1f1b"), (8, "interleaved_1f1b")]
    found = {}
    for (K, kind), word in product(kinds, ("always", "except_last", "never")):
        changed: dict[str, Any] = {"K": K, "schedule": kind, "remat": word, "keep": None}
        found[f"K={K} schedule={kind} remat={word}"] = replace(pipeline, **changed)
    return found


def contenders(words: Sequence[str], number: int) -> dict[str, Row]:
    """Returns choices, the defaults, so many typed pipelines and torch's stages, as `worker` takes them."""
    settings = make_request(words).settings
    planners = [Planner(settings, Options(best=True, most_workers=W)) for _ in range(CHOICES)]
    plans = {f"chosen {n}": Search(planner, FREE).fastest(W) for n, planner in enumerate(planners)}
    plans["defaults"] = planners[0].plan()
    known = typed(settings.pipeline)
    for name in random.Random(0).sample(list(known), min(number, len(known))):
        with suppress(ConfigurationError):  # fewer layers than cells
            plans[name] = planners[0].plan(known[name])
    if tuple(words) in map(REAL.get, NOT_BY_TORCH):
        return {name: as_contender(plan) for name, plan in plans.items()}
    four = Planner(settings, Options(best=True, most_workers=4)).plan(replace(settings.pipeline, K=4, workers=4))
    two, turns = planners[0].plan(known[TORCH_CUTS["1f1b"]]), planners[0].plan(known[TORCH_CUTS["interleaved"]])
    torchs = [(kind, two) for kind in ("gpipe", "1f1b", "zero_bubble")]
    torchs += [("interleaved", turns), ("zero_bubble", turns), ("zbv", four)]
    return {name: as_contender(plan) for name, plan in plans.items()} | {
        f"{TORCH}{kind} K={plan.K}": as_contender(plan) | {"kind": kind, "policy": "never"} for kind, plan in torchs
    }


def as_contender(plan: Plan) -> Row:
    policy = plan.remat if plan.keep is None else plan.keep
    cut, on = [cell.layers for cell in plan.cells], [cell.worker for cell in plan.cells]
    return {"kind": plan.schedule, "cut": cut, "on": on, "policy": policy}


class Layers(Workload):
    """Holds the layers of a configuration, on M micro-batches of the usual shapes."""

    def __init__(self, settings: Settings, rank: int) -> None:
        M, task = settings.pipeline.M, build_task(settings.task, settings.seed)
        sides, _ = example_micro_batch(settings, M, longest=False)
        inputs, targets = (tuple(torch.ones(x.shape, dtype=x.dtype) for x in side) for side in sides)
        super().__init__(rank, W, [(inputs, targets)] * M, task.loss)
        self._builders = build_model(with_example(settings.model, inputs), settings.seed)

    def layers(self, part: range, divisible: bool = False) -> list[nn.Module]:
        return [build_layer(self._builders[place], place, 0, CPU) for place in part]


def worker(context: Context, config: Mapping[str, Any]) -> dict[str, float]:
    """Returns the median seconds of a step of each contender; ``config``: words, contenders and rounds."""
    context.init_process_group()
    watch, work = StopWatch(context.rank, W), Layers(make_request(config["words"]).settings, context.rank)
    steps = {name: contender(name, work=work, **facts) for name, facts in config["contenders"].items()}
    turns = {name: partial(watch.time, step) for name, step in steps.items() if step is not None}
    return {name: median(seconds) for name, seconds in take_turns(turns, config["rounds"], WARM_UP).items()}


def real(model: str, number: int, rounds: int) -> Row:
    """Makes the row of a model."""
    found = contenders(REAL[model], number)
    alike = {name: f"{name.startswith(TORCH)} {facts}" for name, facts in found.items()}
    first = {facts: name for name, facts in reversed(alike.items())}  # equal ones are measured once
    config = {"words": REAL[model], "contenders": {name: found[name] for name in first.values()}, "rounds": rounds}
    taken = run_workers("benchmarks.chosen:worker", W, config, ("torch.distributed.pipelining",))
    seconds: dict[str, float] = {name: taken[first[facts]] for name, facts in alike.items()}
    chosen = max((name for name in found if name.startswith("chosen")), key=seconds.__getitem__)
    best = min((name for name in found if "remat=" in name), key=seconds.__getitem__)
    peer = min((name for name in found if name.startswith(TORCH)), key=seconds.__getitem__, default=None)
    keys = "K={} {kind} {cut} {policy}".format(len(found[chosen]["cut"]), **found[chosen])
    row: Row = {"model": model, "chosen": keys, "its step, s": seconds[chosen], "defaults": seconds["defaults"]}
    row |= {"best typed": best, "its step": seconds[best], "chosen / best typed": seconds[chosen] / seconds[best]}
    row |= {"torch's best": peer, "torch / chosen": peer and seconds[peer] / seconds[chosen]}
    return row | {"contenders": found, "seconds": seconds}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("part", choices=["gaps", "real"])
    options.add_argument("--cases", type=int, default=100, help="of gaps (default: 100)")
    options.add_argument("--free", action="store_true", help="messages of gaps take no time, as in the bounds")
    options.add_argument("--typed", type=int, default=30, help="pipelines typed by hand, of 33 (default: 30)")
    options.add_argument("--rounds", type=int, default=15, help="steps of each contender of real (default: 15)")
    options.add_argument("--models", nargs="+", choices=REAL, default=list(REAL), help="of real; default: all")
    given = options.parse_args()
    if given.quick:
        given.cases, given.typed, given.rounds, given.models = 4, 2, 1, ["amoebanet"]
    if given.part == "gaps":
        report(GAPS, gaps(list(answers(given.cases, given.free))), given.output)
    else:
        report(STEPS, (real(model, given.typed, given.rounds) for model in given.models), given.output)


if __name__ == "__main__":
    main()
