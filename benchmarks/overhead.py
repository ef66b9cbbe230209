"""Measures the engine's time where there is nothing to pipeline: one process, against a plain loop.

Models are T(L,H,A) with dropout at the sizes of conf/model/transformer.yaml and larger; --sizes tiny: the Transformer,
the language model and AmoebaNet of debug=tiny, whose kernels are so short that the host's work shows, and also in 13
cells. Data are random. Engine and loop use the same modules, the task's own loss and M micro-batches; nothing is
recomputed. They take turns. Seconds are the processor's: one thread that never waits, so on an idle machine they equal
wall time, and on a busy one they are still right. The median of the pairs' ratios is shown, with their quartiles.

plain: the usual loop, F0 B0 F1 B1 …, with one graph at a time, as the schedule 1f1b has on a single worker. With gpipe
it does F0 F1 … B1 B0: the graphs of all M micro-batches are alive before the first backward, so the backwards read from
memory what the plain loop's read from the cache. That is the price of the order, not of the engine.

--workers 2 8 64: what grows with the workers, by real ones with one small layer each, which share this machine's cores:
a start (from the entry point to the first step) and the exchange of a step, by the clock and in rank 0's own processor
seconds. A note says what follows for 4,096 that have cores of their own.
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
from gpipe_cli.benchmarks.tables.workers import run_workers
from gpipe_cli.config import Settings
from gpipe_cli.cpu import keep_freed_memory
from gpipe_cli.distributed.world import VALUES, Tree
from gpipe_cli.factory.build import build_task
from gpipe_cli.jobs.configuration import composed, plain
from gpipe_cli.launch.context import Context
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.metrics.journal import Notices
from gpipe_cli.micro_batch import Loss, MicroBatch
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer import transformer
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.pipeline.cell import build_layer
from gpipe_cli.tasks.classification import ClassificationTask
from gpipe_cli.tasks.language_model import LanguageModelTask
from gpipe_cli.tasks.translation import TranslationTask
from gpipe_cli.trainer.assembly import assemble_model, start_worker
from gpipe_cli.trainer.batches import wait_for_all
from gpipe_cli.trainer.run import assemble_training

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


# -- what grows with the workers ---------------------------------------------------------------------------------------

EXCHANGES, FAR = 31, 4096  # exchanges that are timed; workers of the note
NUMBERS_OF_WORKER = 40  # more than a step's message has for each worker
GROWTH = {"workers": ",d", "start, s": ".2f", "rank 0's, s": ".3f", "exchange, ms": ".2f", "rank 0's, ms": ".3f"}


def start(context: Context, config: Row) -> Row:
    """Starts as a worker of gpipe-train does, up to the first step, and exchanges empty messages; returns a row."""
    clocks = (time.perf_counter, time.process_time)
    began, settings, silent = [clock() for clock in clocks], Settings.from_config(config), Notices(print, False)
    world = start_worker(context, settings)
    assembly = assemble_model(context, settings, world, build_task(settings.task, settings.seed), silent)
    assemble_training(context, {"settings": config}, assembly, silent, None)
    started = [clock() - before for clock, before in zip(clocks, began, strict=True)]

    def timed_exchange(run: Callable[[], object]) -> list[float]:
        """Returns the median milliseconds, by the clock and of this processor's."""
        spent = []
        for _ in range(EXCHANGES):
            wait_for_all(world)
            before = [clock() for clock in clocks]
            run()
            spent.append([1e3 * (clock() - then) for clock, then in zip(clocks, before, strict=True)])
        return [statistics.median(each) for each in zip(*spent, strict=True)]

    of_far = torch.zeros(FAR * NUMBERS_OF_WORKER, dtype=torch.float64)
    values = [world.size, *started, *timed_exchange(assembly.pipeline.message.run)]
    hop = timed_exchange(partial(Tree(world.all_ranks, VALUES).add_up, of_far))[0] / 2 if world.size == 2 else None
    return dict(zip(GROWTH, values, strict=True)) | {"hop": hop}


def with_workers(workers: int) -> Row:
    """Returns the row of so many workers."""
    words = ["model._target_=benchmarks.chosen.linears", f"model.widths={[4] * (workers + 1)}", "pipeline.cost=flops"]
    words += ["data._target_=benchmarks.chosen.Zeros", "data.inputs=4", "data.outputs=4", "data.batch_size=8"]
    words += [f"pipeline.K={workers}", f"pipeline.workers={workers}", "task._target_=torch.nn.functional.mse_loss"]
    row: Row = run_workers("benchmarks.overhead:start", workers, plain(composed("train", words)))
    return row


def far_ahead(rows: Sequence[Row]) -> list[str]:
    """Returns what follows for `FAR` workers on cores of their own."""
    hops, (name, *_) = 2 * (FAR - 1).bit_length(), (key for key in GROWTH if key.startswith("rank 0"))
    less, more = rows[-2:]
    grown = (more[name] - less[name]) / (more["workers"] - less["workers"])
    start = more[name] + grown * (FAR - more["workers"])
    said = f"{hops} messages one after the other, each {rows[0]['hop']:.2f} ms with as many numbers"
    return [
        f"{FAR:,} workers: an exchange is {said}: {hops * rows[0]['hop']:.0f} ms; a start takes rank 0 {start:.1f} s"
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", nargs="+", type=int, metavar="W", help="what grows with so many workers, first 2")
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["default", "larger"])
    options.add_argument("--repetitions", type=int, default=31, help="pairs of steps (default: 31)")
    arguments = options.parse_args()
    repetitions = min(arguments.repetitions, 7 if arguments.quick else arguments.repetitions)
    if arguments.workers:
        report(GROWTH, map(with_workers, arguments.workers), arguments.output, far_ahead)
        return
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    subjects = {name: make for size in arguments.sizes for name, make in SIZES[size].items()}
    rows = ({"model": name, **row} for name, make in subjects.items() for row in measure(make(), repetitions))
    report(COLUMNS, rows, arguments.output)


if __name__ == "__main__":
    main()
