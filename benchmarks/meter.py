"""Measures what the bubble meter costs in a step.

One process runs all K cells of T(L,H,A), at the sizes of conf/model/transformer.yaml, so that nothing waits and the
processor's seconds are the step's. The difference of steps with and without the meter is smaller than their own
variation, so its parts are measured directly: `marks`, the marks of the instructions (two readings of a clock and an
entry in a list, times the number of instructions), and `report`, a step's report on rank 0 (adding up, writing,
reading). `share` is their sum over the step's seconds, the median of the repetitions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks.common import Row, parser, report
from benchmarks.overhead import SIZES, build_modules, prepare, random_micro_batches
from gpipe_cli.bench.steps import CPU, EngineStep, engine_step, make_cell
from gpipe_cli.distributed.exchange import Exchange
from gpipe_cli.distributed.world import World
from gpipe_cli.metrics.step_report import StepReporter
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.partition.partition import cell_layers, partition
from gpipe_cli.pipeline.meter import Meter
from gpipe_cli.tasks.translation import TranslationTask

DIRECT = 200  # repetitions of the direct measurements


def build_step(K: int, micro_batches: list[MicroBatch]) -> EngineStep:
    """Builds a step of all cells in this process."""
    modules = build_modules(SIZES["default"])
    cells = [
        make_cell(k, [modules[i] for i in layers], layers.start)
        for k, layers in enumerate(cell_layers(partition([1.0] * len(modules), K, "min_max")))
    ]
    return engine_step(cells, (0,) * K, 0, None, micro_batches, "gpipe", "except_last", TranslationTask().loss)


def seconds_of(action: Callable[[], None], repetitions: int) -> float:
    """Returns the median processor seconds of a call, after one that warms up."""
    action()
    taken = []
    for _ in range(repetitions):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def row(K: int, M: int, micro_batches: list[MicroBatch], repetitions: int) -> Row:
    """Measures the step of one shape, its marks and its report."""
    step, meter = build_step(K, micro_batches), Meter(CPU)
    reporter = StepReporter([-1], K, M, 1, 1, 0, 0)
    exchange, world = Exchange(reporter.fields(), None), World(0, 1, 1, CPU, CPU, None, None, None)

    def marks() -> None:
        meter.begin_step()
        for instruction in step.instructions:
            meter.record(instruction, meter.mark())
        meter.end_step()

    def figures() -> None:
        reporter.write_times(exchange, world, step.engine.meter, (), 1.0, 0.0)
        exchange.run()
        reporter.read(exchange, 1.0)

    seconds = seconds_of(step, repetitions)
    both = {"marks, ms": 1e3 * seconds_of(marks, DIRECT), "report, ms": 1e3 * seconds_of(figures, DIRECT)}
    share = sum(both.values()) / 1e3 / seconds
    return {"K": K, "M": M, "instructions": len(step.instructions), "step, s": seconds, **both, "share": share}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", metavar="K,M", default=["1,4", "4,4", "8,32"])
    arguments = prepare(options)

    def rows() -> Iterator[Row]:
        for K, M in (map(int, shape.split(",")) for shape in arguments.shapes):
            micro_batches = random_micro_batches(8000, arguments.examples, arguments.tokens, M)
            yield row(K, M, micro_batches, arguments.repetitions)

    columns = {"K": "d", "M": "d", "instructions": "d", "step, s": ".4f", "marks, ms": ".3f", "report, ms": ".3f"}
    report({**columns, "share": ".2%"}, rows(), arguments.output)


if __name__ == "__main__":
    main()
