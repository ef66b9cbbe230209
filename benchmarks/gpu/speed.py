"""Measures training steps of the paper's models on one device: the engine at K=1 against a plain loop, in turns.

Engine and loop share modules, precision, task and optimizer. Mini-batches are random, of the sizes that the experiment
has for a micro-batch, and start on the CPU. The plain loop is F0 B0 F1 B1 …, which the schedule 1f1b is at K=1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpipe_cli.bench.steps import Autocast, Step, engine_step, plain_step
from gpipe_cli.bench.timing import take_turns
from gpipe_cli.commands.plan import Request, make_request
from gpipe_cli.distributed.cells import build_cells
from gpipe_cli.distributed.world import World
from gpipe_cli.factory.build import boundary_type_of, build_autocast, build_model, build_optimizer, build_task
from gpipe_cli.factory.example import example_micro_batch
from gpipe_cli.metrics.step_report import peak_memory
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.partition.cut import cut_model
from gpipe_cli.pipeline.cell import LayerFailed
from gpipe_cli.planner.devices import PRESETS, Device
from gpipe_cli.planner.measure.this_device import measure_rates
from gpipe_cli.planner.planner import Planner

from .part import Row, Site, Skipped

REMATS: tuple[Literal["never", "always"], ...] = ("never", "always")
BACKWARD = 2.0  # a backward has so many times the FLOPs of a forward
SECONDS = 12.0  # of the steps that count, for each model
MOST_ROUNDS, TINY_ROUNDS = 10, 1
ROOM = 0.92  # of a device's free memory, for what the plan counts
VALUES = 1000  # tokens and labels are drawn from so many
TINY_VALUES = 10
SHARED = ("pipeline.K=1", "pipeline.workers=1", "pipeline.schedule=1f1b", "pipeline.partition=min_max")
TRANSLATION = ("data.root=/anywhere", "pipeline.M=4", "data.batch_tokens=62500")  # micro-batches as in the experiments
TINY = ("debug=tiny", "pipeline.M=2", "model.L=3")
TINY_TRANSLATION = ("data.batch_tokens=200", "data.source_vocabulary=64", "data.target_vocabulary=64")
TINY_TEXT = ("data.batch_size=2", "data.sequence_length=16", "data.vocabulary=300")
TINY_IMAGES = ("data.batch_size=4", "data.image_size=67", "precision=fp32")
LARGEST_FIRST = ("64_16384_32", "32_16384_32", "12_16384_32", "24_8192_16", "6_8192_16")


def translation(shape: str) -> Callable[[Site], Iterator[Row]]:
    """Returns the measurement of one of the paper's translation models, as "6_8192_16"."""
    return partial(_measure, words=(f"experiment=nmt/t_{shape}", *TRANSLATION), tiny=TINY_TRANSLATION)


def largest(site: Site) -> Iterator[Row]:
    """Measures the largest of the five translation models that fits one device."""
    for shape in LARGEST_FIRST[-1:] if site.tiny else LARGEST_FIRST:
        words = (f"experiment=nmt/t_{shape}", *TRANSLATION)
        if planned_bytes(_request(site, words, TINY_TRANSLATION), site)["always"] <= ROOM * free_bytes(site):
            yield from _measure(site, words, TINY_TRANSLATION)
            return
    raise Skipped("none of the five fits")


def language_model(site: Site) -> Iterator[Row]:
    """Measures the paper's Transformer-L, in bf16."""
    words = ("model=transformer_lm", "model.L=13", "precision=bf16", "pipeline.M=4", "data.batch_size=32")
    yield from _measure(site, words, TINY_TEXT)


def images(site: Site) -> Iterator[Row]:
    """Measures AmoebaNet-B (18, 512) at 480 × 480 pixels, micro-batches as in the experiment."""
    words = ("data.root=/anywhere", "pipeline.M=2", "data.batch_size=32")
    yield from _measure(site, ("experiment=imagenet/amoebanet_b_18_512", *words), TINY_IMAGES)


def _request(site: Site, words: Sequence[str], tiny: Sequence[str]) -> Request:
    """Returns a configuration; ``tiny`` are the words that make its data as small as debug=tiny makes the model."""
    smaller = (*TINY, *tiny) if site.tiny else ()
    return make_request([*words, *SHARED, *smaller, f"pipeline.device={site.device}"])


# -- a model and its steps ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """Holds a model on the device, with a mini-batch.

    Attributes:
        flops: of one forward of the mini-batch.
        units: of the mini-batch that are counted in a second: target tokens, or images.
        word: "tokens" or "images".
    """

    request: Request
    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    micro_batches: list[MicroBatch]
    flops: float
    units: int
    word: str
    autocast: Autocast
    task: Any
    device: torch.device
    engine: Callable[[str], Step]

    def plain(self) -> None:
        """Runs a step without the engine."""
        moved = [tuple(_moved(side, self.device) for side in micro_batch) for micro_batch in self.micro_batches]
        plain_step(self.modules, moved, self.task.loss, "1f1b", self.autocast)()  # type: ignore[arg-type]


def _moved(tensors: Tensors, device: torch.device) -> Tensors:
    return tuple(tensor.to(device, non_blocking=True) for tensor in tensors)


def build_subject(request: Request, site: Site) -> Subject:
    """Builds the model of a configuration on this site's device."""
    settings, device = request.settings, site.torch_device
    torch.set_num_threads(settings.pipeline.threads)  # as a worker does
    builders, task = build_model(settings.model, settings.seed), build_task(settings.task, settings.seed)
    (inputs, targets), _ = example_micro_batch(settings, settings.pipeline.M, False)
    most = TINY_VALUES if site.tiny else VALUES
    torch.manual_seed(1)
    micro_batches: list[MicroBatch] = []
    for _ in range(settings.pipeline.M):
        drawn = [tuple(_drawn(tensor, most, site) for tensor in side) for side in (inputs, targets)]
        micro_batches.append((drawn[0], drawn[1]))
    world = World(0, 1, 1, device, device, None, None, None)
    cut = cut_model(builders, settings.pipeline, 1, micro_batches[0])
    cells = build_cells(builders, cut, world, settings.pipeline, settings.seed, boundary_type_of(settings.precision))
    for cell in cells:
        cell.train(True)
    autocast = build_autocast(settings.precision, device)
    units = targets[0].numel() if targets[0].dim() > 1 else len(targets[0])
    scale = 1.0 / (units * settings.pipeline.M)

    def engine(remat: str) -> Step:
        return engine_step(
            cells, cut.placement, 0, None, micro_batches, "1f1b", remat, task.loss, scale, device, autocast
        )

    return Subject(
        request=request,
        modules=[layer.module for cell in cells for layer in cell.layers],
        parameters=[parameter for cell in cells for _, parameter in cell.parameters()],
        micro_batches=micro_batches,
        flops=settings.pipeline.M * sum(layer.cost for layer in layer_costs(builders, inputs, "flops")),
        units=units * settings.pipeline.M,
        word="tokens" if targets[0].dim() > 1 else "images",
        autocast=autocast,
        task=task,
        device=device,
        engine=engine,
    )


def _drawn(like: Tensor, most: int, site: Site) -> Tensor:
    """Returns random values of a shape, in pinned memory where a GPU reads them."""
    if like.dtype.is_floating_point:
        values = torch.randn(like.shape, dtype=like.dtype)
    else:
        values = torch.randint(1, most, like.shape).to(like.dtype)
    return values.pin_memory() if site.device == "cuda" else values


# -- measurement -------------------------------------------------------------------------------------------------------


def _measure(site: Site, words: Sequence[str], tiny: Sequence[str]) -> Iterator[Row]:
    request = _request(site, words, tiny)
    subject = build_subject(request, site)
    optimizer = build_optimizer(request.settings.optimizer, subject.parameters, request.settings.seed)
    peak, peak_of = _peak_flops(request, site)
    steps = {
        "plain loop": subject.plain,
        **{f"engine, {remat}": subject.engine(remat) for remat in ("never", "always")},
    }
    memory: dict[str, int] = {}
    update = 0.0
    for name, step in list(steps.items()):
        try:
            memory[name] = _first(step, subject)
            update = _timed(optimizer.step, subject)  # the first one makes the optimizer's state
        except (torch.OutOfMemoryError, LayerFailed) as error:
            if not ran_out_of_memory(error):
                raise
            del steps[name]
        if name not in steps:  # here, where the error holds no tensor any more
            yield {"model": words[0], "run": name, "why not": "does not fit"}
        if site.device == "cuda":
            torch.cuda.empty_cache()
    if not steps:
        raise Skipped("does not fit with re-materialization either")
    turns = {name: partial(_timed, step, subject) for name, step in steps.items()}
    once = sum(turn() for turn in turns.values())
    rounds = TINY_ROUNDS if site.tiny else max(2, min(MOST_ROUNDS, int(SECONDS / once)))
    seconds = {name: median(taken) for name, taken in take_turns(turns, rounds).items()}
    planned = planned_bytes(request, site)
    for name, taken in seconds.items():
        yield {
            "model": words[0].partition("=")[2],
            "parameters": sum(parameter.numel() for parameter in subject.parameters),
            "run": name,
            "step, s": taken,
            "update, s": update,
            f"{subject.word}/s": subject.units / (taken + update),
            f"share of {peak_of}": (1 + BACKWARD) * subject.flops / taken / peak,
            "of plain loop": taken / seconds["plain loop"] if "plain loop" in seconds else None,
            "peak, GB": memory[name] / 1e9,
            "planned, GB": planned["always" if name == "engine, always" else "never"] / 1e9,
        }


def ran_out_of_memory(error: BaseException) -> bool:
    """Returns whether there was no memory on the device; the engine names the layer and has torch's error as cause."""
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError)


def _timed(step: Callable[[], object], subject: Subject) -> float:
    """Returns the seconds of a step; the gradients before it are removed, unless it is the optimizer's."""
    if not hasattr(step, "__self__") or not isinstance(step.__self__, torch.optim.Optimizer):
        _without_gradients(subject)
    _wait(subject.device)
    began = time.perf_counter()
    step()
    _wait(subject.device)
    return time.perf_counter() - began


def _first(step: Step, subject: Subject) -> int:
    """Runs a step twice, the second with the optimizer's state there, and returns its peak memory in bytes."""
    _timed(step, subject)
    if subject.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(subject.device)
    _timed(step, subject)
    return peak_memory(subject.device)


def _without_gradients(subject: Subject) -> None:
    for parameter in subject.parameters:
        parameter.grad = None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def planned_bytes(request: Request, site: Site) -> dict[str, float]:
    """Returns by remat the memory of the device that gpipe-plan foresees, worked out without running anything."""
    options = replace(request.options, kernels="accelerator" if site.device == "cuda" else "cpu")
    planner, pipeline = Planner(request.settings, options), request.settings.pipeline
    return {remat: planner.plan(replace(pipeline, remat=remat)).memory for remat in REMATS}


def free_bytes(site: Site) -> float:
    """Returns the bytes that are free on the device; on a CPU without a limit."""
    return float(torch.cuda.mem_get_info()[0]) if site.device == "cuda" else float("inf")


def _peak_flops(request: Request, site: Site) -> tuple[float, str]:
    """Returns the FLOP/s that products reach at most, and whose figure it is: the vendor's, or measured."""
    known = preset(torch.cuda.get_device_name()) if site.device == "cuda" else None
    rates = known or measure_rates(request.settings.pipeline)
    half = request.settings.precision.autocast is not None
    peak = rates.half_flops if half else rates.flops
    return peak, f"{'the vendor' if known else 'the measured'} {'16 bit' if half else 'fp32'} peak"


def preset(name: str) -> Device | None:
    """Returns the described device of a GPU's name, as "NVIDIA H100 80GB HBM3"; None if there is none."""
    words = name.lower().replace("-", " ").split()
    if {"mig", "pcie", "nvl"} & set(words) and "a100" not in words:
        return None  # slower than the model that the figures are for
    for known, device in PRESETS.items():
        if all(word in words for word in known.split("-")):
            return device
    return None
