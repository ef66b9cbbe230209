"""Measures what the bubble meter costs: engine steps with it and without it, and its figures at the end of a step.

One process runs all K cells of T(L,H,A), at the sizes of conf/model/transformer.yaml, so that nothing waits and the
processor's seconds are the step's. Steps with the meter and without it take turns; without it, the engine calls a meter
that does nothing. The median of the pairs' ratios is shown, with their quartiles. It is a small difference of two large
numbers, so the other columns measure the same directly: `marks`, the marks of the instructions (two readings of a clock
and an entry in a list, times the number of instructions), and `report`, a step's report on rank 0 (adding up, writing,
reading). `share` is their sum over the step's seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.common import WARM_UP, Row, parser, report, slower_by
from benchmarks.overhead import SIZES, build_modules, prepare, random_micro_batches
from gpipe_cli.bench.steps import CPU, engine_step, make_cell
from gpipe_cli.bench.timing import take_turns
from gpipe_cli.distributed.exchange import Exchange
from gpipe_cli.distributed.world import World
from gpipe_cli.metrics.step_report import StepReporter
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.partition.partition import cell_layers, partition
from gpipe_cli.pipeline.meter import Meter
from gpipe_cli.schedule.instruction import Instruction
from gpipe_cli.tasks.translation import TranslationTask

DIRECT = 200  # repetitions of the direct measurements


class SilentMeter(Meter):
    """Records nothing."""

    def mark(self) -> float:
        return 0.0

    def record(self, instruction: Instruction, started: object) -> None:
        pass


class MeteredModel:
    """Runs one model in K cells on one worker, with a meter that can be replaced."""

    def __init__(self, K: int, M: int, micro_batches: list[MicroBatch]) -> None:
        modules = build_modules(SIZES["default"])
        placement = (0,) * K
        cells = [
            make_cell(k, [modules[i] for i in layers], layers.start)
            for k, layers in enumerate(cell_layers(partition([1.0] * len(modules), K, "min_max")))
        ]
        self.modules, self.placement, self.K, self.M = modules, placement, K, M
        loss = TranslationTask().loss
        self.engine_step = engine_step(cells, placement, 0, None, micro_batches, "gpipe", "except_last", loss)
        self.meters: dict[str, Meter] = {"on": Meter(CPU), "off": SilentMeter(CPU)}

    def step(self, which: str) -> float:
        """Returns the processor seconds of a step with the meter "on" or "off"."""
        for module in self.modules:
            module.zero_grad()
        self.engine_step.engine.meter = self.meters[which]
        began = time.process_time()
        self.engine_step()
        return time.process_time() - began

    def marks(self) -> float:
        """Returns the seconds of a step's marks."""
        meter, instructions = Meter(CPU), self.engine_step.instructions

        def all_marks() -> None:
            meter.begin_step()
            for instruction in instructions:
                meter.record(instruction, meter.mark())
            meter.end_step()

        return direct(all_marks)

    def report(self) -> float:
        """Returns the seconds of a step's figures on rank 0."""
        reporter = StepReporter([-1], self.K, self.M, 1, 1, 0, 0)
        exchange, world = Exchange(reporter.fields(), None), World(0, 1, 1, CPU, CPU, None, None, None)
        meter = self.meters["on"]

        def figures() -> None:
            reporter.write_times(exchange, world, meter, (), 1.0, 0.0)
            exchange.run()
            reporter.read(exchange, 1.0)

        return direct(figures)


def direct(action: Callable[[], None]) -> float:
    action()
    began = time.process_time()
    for _ in range(DIRECT):
        action()
    return (time.process_time() - began) / DIRECT


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", metavar="K,M", default=["1,4", "4,4", "8,32"])
    arguments = prepare(options)

    def rows() -> Iterator[Row]:
        for K, M in (map(int, shape.split(",")) for shape in arguments.shapes):
            micro_batches = random_micro_batches(8000, arguments.examples, arguments.tokens, M)
            yield row(MeteredModel(K, M, micro_batches), arguments.repetitions)

    columns = {"K": "d", "M": "d", "instructions": "d", "step, s": ".4f", "meter on/off": "+.2%", "quartiles": ""}
    report({**columns, "marks, ms": ".3f", "report, ms": ".3f", "share": ".2%"}, rows(), arguments.output)


def row(bench: MeteredModel, repetitions: int) -> Row:
    seconds = take_turns({which: partial(bench.step, which) for which in bench.meters}, repetitions, WARM_UP)
    middle, quartiles = slower_by(seconds["on"], seconds["off"])
    step, marks, figures = statistics.median(seconds["off"]), bench.marks(), bench.report()
    return {
        "K": bench.K,
        "M": bench.M,
        "instructions": len(bench.engine_step.instructions),
        "step, s": step,
        "meter on/off": middle,
        "quartiles": quartiles,
        "marks, ms": 1e3 * marks,
        "report, ms": 1e3 * figures,
        "share": (marks + figures) / step,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
