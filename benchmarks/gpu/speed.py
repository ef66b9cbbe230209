"""Measures training steps of the paper's models on one device: the engine at K=1 against a plain loop, in turns.

Engine and loop share modules, precision, task and optimizer. Mini-batches are random, of the sizes that the experiment
has for a micro-batch, and start on the CPU. The plain loop is F0 B0 F1 B1 …, which the schedule 1f1b is at K=1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

from gpipe_cli.bench.steps import Step, engine_step, plain_step
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
from gpipe_cli.planner.measure.this_device import measure_rates
from gpipe_cli.planner.planner import Planner
from gpipe_cli.position import Position

from .part import Row, Site, Skipped

Remat = Literal["never", "always"]
REMATS: dict[str, Remat] = {"plain loop": "never", "engine, never": "never", "engine, always": "always"}
BACKWARD = 2.0  # a backward has so many times the FLOPs of a forward
SECONDS = 12.0  # of the steps that count, for each model
MOST_ROUNDS, TINY_ROUNDS = 10, 1
VALUES, TINY_VALUES = 1000, 10  # tokens and labels are drawn from so many
SHARED = ("pipeline.K=1", "pipeline.workers=1", "pipeline.schedule=1f1b", "pipeline.partition=auto")
TRANSLATION = ("data.root=/anywhere", "pipeline.M=4", "data.batch_tokens=62500")  # micro-batches as in the experiments
TINY = ("debug=tiny", "pipeline.M=2", "model.L=3")
TINY_TRANSLATION = ("data.batch_tokens=200", "data.source_vocabulary=64", "data.target_vocabulary=64")
MODELS = {  # by part: the configuration, and the words that make its data as small as debug=tiny makes the model
    "t_6_8192_16": (("experiment=nmt/t_6_8192_16", *TRANSLATION), TINY_TRANSLATION),
    "t_24_8192_16": (("experiment=nmt/t_24_8192_16", *TRANSLATION), TINY_TRANSLATION),
    "transformer_l": (
        ("model=transformer_lm", "model.L=13", "precision=bf16", "pipeline.M=4", "data.batch_size=32"),
        ("data.batch_size=2", "data.sequence_length=16", "data.vocabulary=300"),
    ),
    "amoebanet_b": (
        ("experiment=imagenet/amoebanet_b_18_512", "data.root=/anywhere", "pipeline.M=2", "data.batch_size=32"),
        ("data.batch_size=4", "data.image_size=67", "precision=fp32"),
    ),
}


@dataclass(frozen=True)
class Subject:
    """Holds a model on the device, with a mini-batch.

    Attributes:
        steps: by name, those of `REMATS`.
        update: the optimizer's.
        flops: of one forward of the mini-batch.
        units: of the mini-batch that are counted in a second: target tokens, or images.
        word: "tokens" or "images".
    """

    parameters: list[nn.Parameter]
    steps: dict[str, Step]
    update: Callable[[], object]
    flops: float
    units: int
    word: str
    device: torch.device


def build_subject(request: Request, site: Site) -> Subject:
    """Builds the model of a configuration on this site's device."""
    settings, device, M = request.settings, site.torch_device, request.settings.pipeline.M
    torch.set_num_threads(settings.pipeline.threads)  # as a worker does
    builders, task = build_model(settings.model, settings.seed), build_task(settings.task, settings.seed)
    (inputs, targets), _ = example_micro_batch(settings, M, False)
    torch.manual_seed(1)
    micro_batches = [(drawn(inputs, site), drawn(targets, site)) for _ in range(M)]
    cut = cut_model(builders, settings.pipeline, 1, micro_batches[0])
    world = World(0, 1, 1, device, device, None, None, None)
    cells = build_cells(
        builders, cut, world, settings.pipeline, settings.seed, boundary_type_of(settings.precision), Position()
    )
    for cell in cells:
        cell.train(True)
    modules = [layer.module for cell in cells for layer in cell.layers]
    autocast = build_autocast(settings.precision, device)
    word, units = ("tokens", targets[0].numel()) if targets[0].dim() > 1 else ("images", len(targets[0]))

    def plain() -> None:
        moved: list[MicroBatch] = [(on(device, one), on(device, other)) for one, other in micro_batches]
        plain_step(modules, moved, task.loss, autocast)()

    def engine(remat: str) -> Step:
        return engine_step(
            cells, cut.placement, 0, None, micro_batches, "1f1b", remat, task.loss, 1 / (units * M), device, autocast
        )

    parameters = [parameter for cell in cells for _, parameter in cell.parameters()]
    return Subject(
        parameters=parameters,
        steps={name: plain if name == "plain loop" else engine(remat) for name, remat in REMATS.items()},
        update=build_optimizer(settings.optimizer, parameters, settings.seed).step,
        flops=M * sum(layer.cost for layer in layer_costs(builders, inputs, "flops")),
        units=units * M,
        word=word,
        device=device,
    )


def on(device: torch.device, tensors: Tensors) -> Tensors:
    return tuple(tensor.to(device, non_blocking=True) for tensor in tensors)


def drawn(like: Tensors, site: Site) -> Tensors:
    """Returns random values of these shapes, in pinned memory where a GPU reads them."""
    most = TINY_VALUES if site.tiny else VALUES

    def draw(tensor: Tensor) -> Tensor:
        if tensor.dtype.is_floating_point:
            values = torch.randn(tensor.shape, dtype=tensor.dtype)
        else:
            values = torch.randint(1, most, tensor.shape).to(tensor.dtype)
        return values.pin_memory() if site.device == "cuda" else values

    return tuple(map(draw, like))


def measure(site: Site) -> Iterator[Row]:
    """Measures the model of this part: a row for the plain loop and for the engine with each policy of remat."""
    words, tiny = MODELS[site.part]
    request = make_request([*words, *SHARED, *((*TINY, *tiny) if site.tiny else ()), f"pipeline.device={site.device}"])
    peak = peak_flops(request)  # before the model takes the memory
    subject = build_subject(request, site)
    memory: dict[str, int] = {}
    update = 0.0
    for name, step in subject.steps.items():
        try:
            timed(step, subject)
            update = timed(subject.update, subject)  # the first one makes the optimizer's state
            memory[name] = peak_of(step, subject)
        except (torch.OutOfMemoryError, LayerFailed) as error:
            if not ran_out_of_memory(error):
                raise
        if name not in memory:  # here, where the error holds no tensor any more
            yield {"run": name, "why not": "does not fit"}
            clear(subject)
        if site.device == "cuda":
            torch.cuda.empty_cache()
    if not memory:
        raise Skipped("does not fit with re-materialization either")
    turns = {name: partial(timed, subject.steps[name], subject) for name in memory}
    once = sum(turn() for turn in turns.values())
    rounds = TINY_ROUNDS if site.tiny else max(2, min(MOST_ROUNDS, int(SECONDS / once)))
    seconds = {name: median(taken) for name, taken in take_turns(turns, rounds).items()}
    planned = planned_bytes(request, site)
    for name, taken in seconds.items():
        yield {
            "parameters": sum(parameter.numel() for parameter in subject.parameters),
            "run": name,
            "step, s": taken,
            "update, s": update,
            f"{subject.word}/s": subject.units / (taken + update),
            "share of the measured peak": (1 + BACKWARD) * subject.flops / taken / peak,
            "of plain loop": taken / seconds["plain loop"] if "plain loop" in seconds else None,
            "peak, GB": memory[name] / 1e9,
            "planned, GB": planned[REMATS[name]] / 1e9,
        }


def ran_out_of_memory(error: BaseException) -> bool:
    """Returns whether there was no memory on the device; the engine names the layer and has torch's error as cause."""
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError)


def timed(step: Callable[[], object], subject: Subject) -> float:
    """Returns the seconds of a step, or of an update; a step begins without gradients."""
    if step is not subject.update:
        clear(subject)
    wait(subject.device)
    began = time.perf_counter()
    step()
    wait(subject.device)
    return time.perf_counter() - began


def peak_of(step: Step, subject: Subject) -> int:
    """Runs a step when the optimizer's state is there, and returns its peak memory in bytes."""
    if subject.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(subject.device)
    timed(step, subject)
    return peak_memory(subject.device)


def clear(subject: Subject) -> None:
    """Removes the gradients."""
    for parameter in subject.parameters:
        parameter.grad = None


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def planned_bytes(request: Request, site: Site) -> dict[Remat, float]:
    """Returns by remat the memory of the device that gpipe-plan foresees, worked out without running anything."""
    options = replace(request.options, kernels="accelerator" if site.device == "cuda" else "cpu")
    planner, pipeline = Planner(request.settings, options), request.settings.pipeline
    return {remat: planner.plan(replace(pipeline, remat=remat)).memory for remat in set(REMATS.values())}


def peak_flops(request: Request) -> float:
    """Returns the FLOP/s that products reach on this device, in the configuration's type of numbers."""
    rates = measure_rates(request.settings.pipeline)
    return rates.flops if request.settings.precision.autocast is None else rates.half_flops
