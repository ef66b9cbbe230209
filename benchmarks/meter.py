"""What the bubble meter costs: engine steps with it and without it, and its figures at the end of a step.

One process runs all K cells of T(L,H,A), at the sizes of conf/model/transformer.yaml, so that nothing waits and the
processor's seconds are the step's. Steps with the meter and without it take turns; without it, the engine calls a meter
that does nothing. The median of the pairs' ratios is shown, with their quartiles. It is a small difference of two large
numbers, so the other columns measure the same directly: what the marks of the instructions cost (two readings of a
clock and an entry in a list, times the number of instructions), and what a step's report costs on rank 0 (adding up,
writing, reading, the forecast of the schedule). `share` is their sum over the step's seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import Report, parser
from benchmarks.overhead import SIZES, build_modules, random_parts
from gpipe_cli.bench.driver import CPU
from gpipe_cli.pipeline.cell import BuiltLayer, Cell
from gpipe_cli.pipeline.engine import Part, Pipeline, StepPlan
from gpipe_cli.pipeline.forecast import Forecast
from gpipe_cli.pipeline.instruction import Instruction
from gpipe_cli.pipeline.meter import Meter
from gpipe_cli.pipeline.partition import cell_layers, partition
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.schedule import schedule
from gpipe_cli.tasks.translation import TranslationTask
from gpipe_cli.trainer.exchange import Exchange
from gpipe_cli.trainer.step_report import StepReporter
from gpipe_cli.trainer.world import World

DIRECT = 200  # repetitions of what is measured directly


class Silent(Meter):
    """A meter that records nothing."""

    def mark(self) -> float:
        return 0.0

    def record(self, instruction: Instruction, started: object) -> None:
        """Nothing."""


class Bench:
    """One model in K cells on one worker, with a meter that can be taken out."""

    def __init__(self, K: int, M: int, parts: list[Part]) -> None:
        modules = build_modules(SIZES["default"])
        self.placement = (0,) * K
        cells = [
            Cell(k, [BuiltLayer(i, f"layer.{i}", modules[i]) for i in layers], NoiseSource(0, 0, CPU))
            for k, layers in enumerate(cell_layers(partition([1.0] * len(modules), K, "min_max")))
        ]
        self.modules, self.parts, self.K, self.M = modules, parts, K, M
        self.engine = Pipeline(cells, self.placement, None, TranslationTask().loss, 1, CPU)
        self.lists = schedule("gpipe", self.placement, M, "except_last")
        signatures = tuple(tuple(tensor.shape for tensor in inputs + targets) for inputs, targets in parts)
        self.plan = StepPlan(0, 1, signatures, 1.0)
        self.meters: dict[str, Meter] = {"on": Meter(CPU), "off": Silent(CPU)}

    def step(self, which: str) -> float:
        """Processor seconds of a step with the meter "on" or "off"."""
        for module in self.modules:
            module.zero_grad()
        self.engine.meter = self.meters[which]
        began = time.process_time()
        self.engine.meter.begin_step()
        self.engine.train_step(self.lists[0], self.plan, self.parts)
        self.engine.meter.end_step()
        return time.process_time() - began

    def marks(self) -> float:
        """Seconds that a step's marks cost."""
        meter, program = Meter(CPU), self.lists[0]

        def all_marks() -> None:
            meter.begin_step()
            for instruction in program:
                meter.record(instruction, meter.mark())
            meter.end_step()

        return direct(all_marks)

    def report(self) -> float:
        """Seconds that a step's figures cost on rank 0."""
        reporter = StepReporter([-1], self.K, self.M, 1, 1, 0, 0)
        exchange, world = Exchange(reporter.fields(), None), World(0, 1, 1, CPU, CPU, None, None, None)
        meter, forecast = self.meters["on"], Forecast(self.lists, self.placement)

        def figures() -> None:
            reporter.write_times(exchange, world, meter, (), 1.0, 0.0)
            exchange.run()
            report = reporter.read(exchange, 1.0)
            forecast.bubble(forecast.mean_durations(report.cells))

        return direct(figures)


def direct(action: Callable[[], None]) -> float:
    action()
    began = time.process_time()
    for _ in range(DIRECT):
        action()
    return (time.process_time() - began) / DIRECT


def measure(bench: Bench, repetitions: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for repetition in range(repetitions + 2):
        for which in ("on", "off") if repetition % 2 else ("off", "on"):
            taken = bench.step(which)
            if repetition >= 2:
                seconds[which].append(taken)
    return seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", metavar="K,M", default=["1,4", "4,4", "8,32"])
    options.add_argument("--examples", type=int, default=64, help="in a mini-batch (default: 64)")
    options.add_argument("--tokens", type=int, default=24, help="on each side of an example (default: 24)")
    options.add_argument("--repetitions", type=int, default=31, help="pairs of steps (default: 31)")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions = min(arguments.repetitions, 7)
    torch.set_num_threads(1)
    columns = {"K": "d", "M": "d", "instructions": "d", "step, s": ".4f", "meter on/off": "+.2%", "quartiles": ""}
    report = Report({**columns, "marks, ms": ".3f", "report, ms": ".3f", "share": ".2%"})
    report.begin()
    for K, M in (map(int, shape.split(",")) for shape in arguments.shapes):
        report.add(row(Bench(K, M, random_parts(8000, arguments.examples, arguments.tokens, M)), arguments.repetitions))
    report.end(arguments.output)


def row(bench: Bench, repetitions: int) -> dict[str, Any]:
    seconds = measure(bench, repetitions)
    ratios = [on / off - 1 for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    step, marks, figures = statistics.median(seconds["off"]), bench.marks(), bench.report()
    return {
        "K": bench.K,
        "M": bench.M,
        "instructions": len(bench.lists[0]),
        "step, s": step,
        "meter on/off": middle,
        "quartiles": f"{low:+.2%} … {high:+.2%}",
        "marks, ms": 1e3 * marks,
        "report, ms": 1e3 * figures,
        "share": (marks + figures) / step,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
