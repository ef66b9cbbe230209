"""Measures the engine's time where there is nothing to pipeline: one process, against a plain loop.

Models are T(L,H,A) with dropout at the sizes of conf/model/transformer.yaml and larger; --sizes tiny: the Transformer,
the language model and AmoebaNet of debug=tiny, whose kernels are so short that the host's work shows, and also in 13
cells. Data are random. Engine and loop use the same modules, the task's own loss and M micro-batches; nothing is
recomputed. They take turns. Seconds are the processor's: one thread that never waits, so on an idle machine they equal
wall time, and on a busy one they are still right. The median of the pairs' ratios is shown, with their quartiles.

plain: the usual loop, F0 B0 F1 B1 …, with one graph at a time, as the schedule 1f1b has on a single worker. With gpipe
it does F0 F1 … B1 B0: the graphs of all M micro-batches are alive before the first backward, so the backwards read from
memory what the plain loop's read from the cache. That is the price of the order, not of the engine.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.common import WARM_UP, Row, parser, report
from benchmarks.tables.steps import CPU, Step, engine_step, make_cell, plain_step
from benchmarks.tables.timing import take_turns
from gpipe_cli.cpu import keep_freed_memory
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import Loss, MicroBatch
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer import transformer
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.pipeline.cell import build_layer
from gpipe_cli.tasks.classification import ClassificationTask
from gpipe_cli.tasks.language_model import LanguageModelTask
from gpipe_cli.tasks.translation import TranslationTask

KINDS = ("1f1b", "gpipe")
EXAMPLES, TOKENS, M = 64, 24, 4  # of a mini-batch; on each side of an example; micro-batches
IMAGES, PIXELS, CELLS = 16, 32, 13
COLUMNS = {"model": "", "parameters": ",d", "K": "", "schedule": "", "plain, s": ".4f"}
COLUMNS |= {"engine, s": ".4f", "slower by": "+.2%", "quartiles": ""}


@dataclass(frozen=True)
class Subject:
    """Holds what is trained: layers, micro-batches, loss, and the numbers of cells."""

    builders: Sequence[LayerBuilder]
    micro_batches: list[MicroBatch]
    loss: Loss
    cells: tuple[int, ...] = (1,)

    def modules(self) -> list[nn.Module]:
        return [build_layer(builder, index, 0, CPU) for index, builder in enumerate(self.builders)]


def split(*tensors: Tensor) -> list[MicroBatch]:
    """Returns micro-batches, whose last tensor is the target."""
    return [(tuple(inputs), (target,)) for *inputs, target in zip(*(x.tensor_split(M) for x in tensors), strict=True)]


def translation(vocabulary: int, L: int, H: int, A: int, d_model: int, cells: tuple[int, ...] = (1,)) -> Subject:
    builders = transformer(L, H, A, vocabulary, vocabulary, d_model)
    ids = torch.randint(1, vocabulary, (3, EXAMPLES, TOKENS))  # source, target input, target; none is padding
    return Subject(builders, split(*ids), TranslationTask().loss, cells)


def language_model() -> Subject:
    ids = torch.randint(1, 64, (2, EXAMPLES, TOKENS))
    return Subject(transformer_lm(8, 64, 1, 64, 32), split(*ids), LanguageModelTask().loss, (1, CELLS))


def images() -> Subject:
    pixels, labels = torch.randn(IMAGES, 3, PIXELS, PIXELS), torch.randint(10, (IMAGES,))
    layers = amoebanet(12, 16, 10, PIXELS, auxiliary_head=False)
    return Subject(layers, split(pixels, labels), ClassificationTask().loss, (1, CELLS))


SIZES: dict[str, dict[str, Callable[[], Subject]]] = {
    "tiny": {
        "T(3,64,1)": partial(translation, 64, 3, 64, 1, 32, (1, CELLS)),
        "Transformer-L(8)": language_model,
        "AmoebaNet-D(12,16)": images,
    },
    "default": {"T(3,512,2)": partial(translation, 8000, 3, 512, 2, 128)},
    "larger": {"T(6,2048,8)": partial(translation, 8000, 6, 2048, 8, 512)},
}


def timed(step: Step, modules: Sequence[nn.Module]) -> float:
    for module in modules:
        module.zero_grad()
    began = time.process_time()
    step()
    return time.process_time() - began


def in_cells(modules: Sequence[nn.Module], subject: Subject, K: int, kind: str) -> Step:
    """Returns the engine's step, with the layers in K cells of about as many layers."""
    firsts = [len(modules) * k // K for k in range(K + 1)]
    cells = [make_cell(k, modules[firsts[k] : firsts[k + 1]], firsts[k]) for k in range(K)]
    return engine_step(cells, (0,) * K, 0, None, subject.micro_batches, kind, loss=subject.loss)


def measure(subject: Subject, repetitions: int) -> Iterator[Row]:
    """Makes a row for the engine with each number of cells and kind of schedule, beside the plain loop."""
    modules = subject.modules()
    steps: dict[str, Step] = {"plain": plain_step(modules, subject.micro_batches, subject.loss)}
    rows = [(K, kind) for K in subject.cells for kind in KINDS]
    steps |= {f"{K} {kind}": in_cells(modules, subject, K, kind) for K, kind in rows}
    turns = {name: partial(timed, step, modules) for name, step in steps.items()}
    seconds = take_turns(turns, repetitions, WARM_UP)
    plain, parameters = seconds["plain"], sum(p.numel() for module in modules for p in module.parameters())
    for K, kind in rows:
        own = seconds[f"{K} {kind}"]
        shares = [mine / other - 1 for mine, other in zip(own, plain, strict=True)]
        low, middle, high = statistics.quantiles(shares if repetitions > 1 else shares * 2, n=4)
        row: Row = {"parameters": parameters, "K": K, "schedule": kind, "plain, s": statistics.median(plain)}
        row |= {"engine, s": statistics.median(own), "slower by": middle, "seconds": seconds}
        yield row | {"quartiles": f"{low:+.2%} … {high:+.2%}"}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["default", "larger"])
    options.add_argument("--repetitions", type=int, default=31, help="pairs of steps (default: 31)")
    arguments = options.parse_args()
    repetitions = min(arguments.repetitions, 7 if arguments.quick else arguments.repetitions)
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    subjects = {name: make for size in arguments.sizes for name, make in SIZES[size].items()}
    rows = ({"model": name, **row} for name, make in subjects.items() for row in measure(make(), repetitions))
    report(COLUMNS, rows, arguments.output)


if __name__ == "__main__":
    main()
