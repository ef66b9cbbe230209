"""Measures the engine's time where there is nothing to pipeline: K=1, one process, against a plain loop.

The model is T(L,H,A) with dropout, once at the sizes of conf/model/transformer.yaml and once larger; data are random
tokens. Engine and loop use the same modules, the task's own loss and M micro-batches; nothing is recomputed. They take
turns. Seconds are the processor's: one thread that never waits, so on an idle machine they equal wall time, and on a
busy one they are still right. The median of the pairs' ratios is shown, with their quartiles; and the operations of a
step (views not counted), which a GPU's host has to start.

plain: the usual loop, F0 B0 F1 B1 …, with one graph at a time, as the schedule 1f1b has on a single worker. With gpipe
it does F0 F1 … B1 B0: the graphs of all M micro-batches are alive before the first backward, so the backwards read from
memory what the plain loop's read from the cache. That is the price of the order, not of the engine.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.common import WARM_UP, Row, parser, report
from gpipe_cli.benchmarks.tables.steps import CPU, Step, engine_step, make_cell, plain_step
from gpipe_cli.benchmarks.tables.timing import take_turns
from gpipe_cli.cpu import keep_freed_memory
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.models.transformer import transformer
from gpipe_cli.pipeline.cell import build_layer
from gpipe_cli.planner.measure.tracking import Tracker
from gpipe_cli.tasks.translation import TranslationTask

KINDS = ("1f1b", "gpipe")
EXAMPLES, TOKENS, M = 64, 24, 4  # of a mini-batch; on each side of an example; micro-batches
SIZES = {
    "tiny": {"L": 1, "H": 32, "A": 1, "d_model": 32, "vocabulary": 64},
    "default": {"L": 3, "H": 512, "A": 2, "d_model": 128, "vocabulary": 8000},
    "larger": {"L": 6, "H": 2048, "A": 8, "d_model": 512, "vocabulary": 8000},
}
COLUMNS = {"model": "", "parameters": ",d", "schedule": "", "plain, s": ".4f"}
COLUMNS |= {"engine, s": ".4f", "slower by": "+.2%", "quartiles": "", "operations, both": ""}


def build_modules(vocabulary: int, **sizes: Any) -> list[nn.Module]:
    builders = transformer(**sizes, source_vocabulary=vocabulary, target_vocabulary=vocabulary)
    return [build_layer(builder, index, 0, CPU) for index, builder in enumerate(builders)]


def random_micro_batches(vocabulary: int) -> list[MicroBatch]:
    """Returns micro-batches of source, target input and target ids, without padding."""
    pieces = zip(*(x.tensor_split(M) for x in torch.randint(1, vocabulary, (3, EXAMPLES, TOKENS))), strict=True)
    return [((source, before), (after,)) for source, before, after in pieces]


def timed(step: Step, modules: Sequence[nn.Module]) -> float:
    for module in modules:
        module.zero_grad()
    began = time.process_time()
    step()
    return time.process_time() - began


def operations(step: Callable[[], object]) -> int:
    """Returns how many operations other than views a step has."""
    with Tracker() as tracker:
        step()
    return len(tracker.operations)


def measure(modules: Sequence[nn.Module], micro_batches: Sequence[MicroBatch], repetitions: int) -> Iterator[Row]:
    """Makes a row for the engine with each kind of schedule, beside the plain loop."""
    loss, cell = TranslationTask().loss, make_cell(0, modules)
    steps: dict[str, Step] = {"plain": plain_step(modules, micro_batches, loss)}
    steps |= {kind: engine_step([cell], (0,), 0, None, micro_batches, kind, loss=loss) for kind in KINDS}
    turns = {name: partial(timed, step, modules) for name, step in steps.items()}
    seconds = take_turns(turns, repetitions, WARM_UP)
    plain, parameters = seconds["plain"], sum(p.numel() for module in modules for p in module.parameters())
    for kind in KINDS:
        shares = [mine / other - 1 for mine, other in zip(seconds[kind], plain, strict=True)]
        low, middle, high = statistics.quantiles(shares if repetitions > 1 else shares * 2, n=4)
        row: Row = {"parameters": parameters, "schedule": kind, "plain, s": statistics.median(plain)}
        row |= {"engine, s": statistics.median(seconds[kind]), "slower by": middle, "seconds": seconds}
        row["operations, both"] = f"{operations(turns['plain']):,} {operations(turns[kind]):,}"
        yield row | {"quartiles": f"{low:+.2%} … {high:+.2%}"}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["default", "larger"])
    options.add_argument("--repetitions", type=int, default=31, help="pairs of steps (default: 31)")
    arguments = options.parse_args()
    repetitions = min(arguments.repetitions, 7 if arguments.quick else arguments.repetitions)
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does

    def rows() -> Iterator[Row]:
        for name in arguments.sizes:
            micro_batches = random_micro_batches(SIZES[name]["vocabulary"])
            for row in measure(build_modules(**SIZES[name]), micro_batches, repetitions):
                yield {"model": name, **row}

    report(COLUMNS, rows(), arguments.output)


if __name__ == "__main__":
    main()
