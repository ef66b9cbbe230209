"""Measures training steps of the paper's models on one device: the engine at K=1 against a plain loop, in turns.

Engine and loop share modules, precision, task and optimizer. Mini-batches are random, of the sizes that the experiment
has for a micro-batch, and start on the CPU. The plain loop is F0 B0 F1 B1 …, which the schedule 1f1b is at K=1.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.common import Row
from gpipe_cli.benchmarks.tables.steps import EngineStep, Step, engine_step, plain_step
from gpipe_cli.benchmarks.tables.timing import take_turns
from gpipe_cli.commands.plan import make_request
from gpipe_cli.config import Settings
from gpipe_cli.distributed.pipeline import build_cells
from gpipe_cli.distributed.world import World
from gpipe_cli.factory.build import boundary_type_of, build_autocast, build_model, build_optimizer, build_task
from gpipe_cli.factory.example import example_micro_batch
from gpipe_cli.factory.groups import Groups
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.partition.cost import count_forward
from gpipe_cli.partition.cut import cut_model
from gpipe_cli.partition.survey import survey
from gpipe_cli.pipeline.step import peak_memory
from gpipe_cli.planner.measure.this_device import measure_device
from gpipe_cli.position import Position

from .checks import Site

BACKWARD = 2.0  # a backward has so many times the FLOPs of a forward
SECONDS = 12.0  # of the steps that count, for each model
MOST_ROUNDS = 10
VALUES, TINY_VALUES = 1000, 10  # tokens and labels are drawn from so many
SHARED = (
    "pipeline.K=1",
    "pipeline.workers=1",
    "pipeline.schedule=1f1b",
    "pipeline.partition=auto",
    "pipeline.cost=flops",
)
# micro-batches as in the experiments; of T(24,8192,16) half, which a GPU of 80 GB holds
TRANSLATION = ("data.root=/anywhere", "pipeline.M=4", "data.batch_tokens=62500")
TINY = ("debug=tiny", "pipeline.M=2", "model.L=3")
TINY_TRANSLATION = ("data.batch_tokens=200", "data.source_vocabulary=64", "data.target_vocabulary=64")
MODELS = {  # by part: the configuration, and the words that make its data as small as debug=tiny makes the model
    "t_6_8192_16": (("experiment=nmt/t_6_8192_16", *TRANSLATION), TINY_TRANSLATION),
    "t_24_8192_16": (("experiment=nmt/t_24_8192_16", *TRANSLATION, "pipeline.M=8"), TINY_TRANSLATION),
    "transformer_l": (
        ("model=transformer_lm", "model.L=13", "precision=bf16", "pipeline.M=4", "data.batch_size=32"),
        ("data.batch_size=2", "data.sequence_length=16", "data.vocabulary=300"),
    ),
    "amoebanet_b": (
        ("experiment=imagenet/amoebanet_b_18_512", "data.root=/anywhere", "pipeline.M=2", "data.batch_size=32"),
        ("data.batch_size=4", "data.image_size=67", "precision=fp32"),
    ),
}


class Subject:
    """Holds a model on a device with a mini-batch, its optimizer, and steps of a plain loop and of the engine.

    Args:
        most: tokens and labels are drawn from so many.
    """

    def __init__(self, settings: Settings, device: torch.device, most: int) -> None:
        torch.set_num_threads(settings.pipeline.threads)  # as a worker does
        self._device, M, precision = device, settings.pipeline.M, settings.precision
        builders, task = build_model(settings.model, settings.seed), build_task(settings.task, settings.seed)
        (inputs, targets), _ = example_micro_batch(settings, M, False)
        torch.manual_seed(1)
        batch = [(self._drawn(inputs, most), self._drawn(targets, most)) for _ in range(M)]
        cut = cut_model(builders, settings.pipeline, 1, batch[0])
        world = World(0, 1, 1, device, device, None, None, None)
        boundary = boundary_type_of(precision)
        cells = build_cells(builders, cut, world, settings.pipeline, settings.seed, boundary, Position())
        for cell in cells:
            cell.train(True)
        self.parameters = [parameter for cell in cells for _, parameter in cell.parameters()]
        self.word = "tokens" if targets[0].dim() > 1 else "images"
        self.units = M * (targets[0].numel() if self.word == "tokens" else len(targets[0]))
        self.flops = M * (1 + BACKWARD) * sum(layer.cost for layer in survey(builders, inputs, count_forward).layers)
        members = Groups(settings.optimizer).divided(pair for cell in cells for pair in cell.parameters())
        self.update = build_optimizer(settings.optimizer, members, settings.seed).step
        modules, autocast = [layer.module for cell in cells for layer in cell.layers], build_autocast(precision, device)

        def plain() -> None:
            moved: list[MicroBatch] = [(self._moved(one), self._moved(other)) for one, other in batch]
            plain_step(modules, moved, task.loss, autocast)()

        steps = {
            f"engine, {remat}": engine_step(
                cells, cut.placement, 0, None, batch, "1f1b", remat, task.loss, self.units, device, autocast
            )
            for remat in ("never", "always")
        }
        self.steps: dict[str, Step] = {"plain loop": plain, **steps}
        if device.type == "cuda" and precision.deterministic:
            self.steps["engine, never, bits may vary"] = partial(varying, steps["engine, never"])

    def _drawn(self, like: Tensors, most: int) -> Tensors:
        """Returns random values of these shapes, in pinned memory where a GPU reads them."""

        def draw(x: Tensor) -> Tensor:
            values = torch.randn(x.shape) if x.dtype.is_floating_point else torch.randint(1, most, x.shape)
            return values.to(x.dtype).pin_memory() if self._device.type == "cuda" else values.to(x.dtype)

        return tuple(map(draw, like))

    def _moved(self, tensors: Tensors) -> Tensors:
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in tensors)

    def timed(self, run: Callable[[], object]) -> float:
        """Returns the seconds of a step, which begins without gradients, or of an update."""
        for parameter in self.parameters if run != self.update else ():
            parameter.grad = None
        self._wait()
        began = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - began

    def peak_of(self, step: Step) -> tuple[float, int]:
        """Runs a step, and returns its seconds and its peak memory in bytes."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        return self.timed(step), peak_memory(self._device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def varying(step: Step) -> None:
    """Runs a step as with precision.deterministic=false."""
    torch.use_deterministic_algorithms(False)
    try:
        step()  # it may not fit
    finally:
        torch.use_deterministic_algorithms(True)


def host(site: Site) -> Iterator[Row]:
    """Runs steps that raise where the host waits; counts kernels, and compares instructions with the clock."""
    words = (*MODELS["t_6_8192_16"][0], *SHARED, *TINY, *TINY_TRANSLATION, f"pipeline.device={site.device}")
    subject = Subject(make_request(words).settings, torch.device(site.device), TINY_VALUES)
    for name, step in subject.steps.items():
        if not isinstance(step, EngineStep):
            continue
        subject.timed(step)  # CUDA's libraries are loaded
        with torch.profiler.profile() as profile:
            subject.timed(step)
        started = sum(event.name.startswith(("cudaLaunch", "cuLaunch")) for event in profile.events())
        if site.gpus:
            torch.cuda.set_sync_debug_mode("error")
        seconds = subject.timed(step)
        if site.gpus:
            torch.cuda.set_sync_debug_mode("default")
        spans = sum(span.end - span.start for span in step.engine.meter.spans)
        yield {"run": name, "ok": spans <= seconds, "step, s": seconds, "instructions, s": spans, "kernels": started}


def measure(site: Site) -> Iterator[Row]:
    """Measures the model of this part: a row for the plain loop and for the engine with each policy of remat."""
    words, tiny = MODELS[site.part]
    words = (*words, *SHARED, *((*TINY, *tiny) if site.tiny else ()), f"pipeline.device={site.device}")
    settings = make_request(words).settings
    rates = measure_device(settings.pipeline)  # before the model takes the memory
    subject = Subject(settings, torch.device(site.device), TINY_VALUES if site.tiny else VALUES)
    memory: dict[str, int] = {}
    update = once = 0.0
    for name, step in subject.steps.items():
        with suppress(torch.OutOfMemoryError):  # a layer's, too
            subject.timed(step)
            update = subject.timed(subject.update)  # the first one makes the optimizer's state
            taken, memory[name] = subject.peak_of(step)
            once += taken
        if name not in memory:
            yield {"run": name, "why not": "does not fit"}
        if site.gpus:
            torch.cuda.empty_cache()  # here, where the error holds no tensor any more
    turns = {name: partial(subject.timed, subject.steps[name]) for name in memory}
    rounds = 1 if site.tiny or not turns else max(2, min(MOST_ROUNDS, int(SECONDS / once)))
    seconds = {name: median(taken) for name, taken in take_turns(turns, rounds).items()}
    for name, taken in seconds.items():
        peak = rates.flops if settings.precision.autocast is None else rates.half_flops
        yield {
            "parameters": sum(parameter.numel() for parameter in subject.parameters),
            "run": name,
            "step, s": taken,
            "update, s": update,
            f"{subject.word}/s": subject.units / (taken + update),
            "share of the measured peak": subject.flops / taken / peak,
            "of plain loop": taken / seconds["plain loop"] if "plain loop" in seconds else None,
            "peak, GB": memory[name] / 1e9,
        }
