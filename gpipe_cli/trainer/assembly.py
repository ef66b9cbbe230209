"""Puts together what a worker works with, from the configuration: once for every command that runs the pipeline.

`assemble_model` makes everything up to the engine: enough to evaluate, to translate, to compare. `training.py` adds
what learns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ..checkpoint.layer_state import named_tensors
from ..config import Settings
from ..data.source import Source
from ..decoding.decoding import Decoder, DecoderRuntime, SpecialTokens
from ..decoding.generation import Generator
from ..distributed.batch_plan import BatchPlanCodec, BatchShape
from ..distributed.exchange import Exchange, never
from ..distributed.world import World
from ..errors import ConfigurationError, PlainError
from ..factory.build import (
    Cut,
    build_autocast,
    build_cells,
    build_model,
    build_source,
    cut_model,
    refuse_more_cells_than_layers,
)
from ..factory.profiles import profiled_costs
from ..launch.context import Context
from ..layers import LayerBuilder
from ..metrics.journal import Journal
from ..metrics.predictions import PredictionKeeper
from ..pipeline.cell import Cell
from ..pipeline.engine import TASK, Pipeline
from ..pipeline.transport import Transport, connect_workers
from ..schedule.run_schedules import RunSchedules
from ..tasks.base import GenerationSettings, Task
from .batches import first_batch
from .data_notices import forward_warnings
from .evaluation import Evaluator
from .preparation import prepare_in_turn


@dataclass(frozen=True)
class Survey:
    """What rank 0 found out for all from the first mini-batch.

    Attributes:
        form: of the data.
        cut: of the model.
        special: the tokens that begin and end a sentence, where there are sentences.
        examples: of replica 0's share of the mini-batch.
    """

    form: BatchShape
    cut: Cut
    special: tuple[int, int]
    examples: int


@dataclass(frozen=True)
class Assembly:
    """One worker's part of the pipeline, ready to run.

    Attributes:
        source: of the data; on the first worker of each replica, None elsewhere.
        cells: this worker's.
        layers: of the whole model: the names of the parameters of each.
        parameter_names: full names of all parameters of the model, in layer order.
        own_parameters: the places of this worker's parameters among them.
        losses: the indices of the layers with an auxiliary loss, and last `TASK`.
    """

    settings: Settings
    world: World
    task: Task
    source: Source | None
    survey: Survey
    cells: list[Cell]
    layers: dict[str, list[str]]
    parameter_names: list[str]
    own_parameters: list[int]
    losses: list[int]
    schedules: RunSchedules
    engine: Pipeline
    codec: BatchPlanCodec

    @property
    def cut(self) -> Cut:
        return self.survey.cut


def assemble_model(context: Context, settings: Settings, world: World, task: Task, journal: Journal) -> Assembly:
    """Data, model, cells and engine; every worker calls it at the same time.

    Raises:
        ConfigurationError: something in the configuration that shows only now.
    """
    builders = build_model(settings.model)
    refuse_more_cells_than_layers(len(builders), settings.pipeline)  # before a corpus is made, which takes minutes
    source = open_source(settings, world, journal, context.stop_requested)
    if source is not None:
        forward_warnings(source, context.emit)
    found = world.broadcast(lambda: survey(builders, settings, world, cast(Source, source), journal.message))
    journal.cells(found.cut.table)
    cells = build_cells(builders, found.cut, world, settings.seed, settings.pipeline.sync_batchnorm)
    for cell in cells:
        cell.train(True)
    layers, names, own, losses = whole_model(world, cells)
    placement = found.cut.placement
    engine = Pipeline(
        cells,
        placement,
        make_transport(world, found.cut),
        task.loss,
        len(found.form.targets),
        world.device,
        build_autocast(settings.precision, world.device),
        context.where,
    )
    return Assembly(
        settings=settings,
        world=world,
        task=task,
        source=source,
        survey=found,
        cells=cells,
        layers=layers,
        parameter_names=names,
        own_parameters=own,
        losses=losses,
        schedules=RunSchedules(settings.pipeline.schedule, placement, settings.pipeline.remat),
        engine=engine,
        codec=BatchPlanCodec(found.form, settings.pipeline.M, world.replica, world.replicas),
    )


def evaluation_fields(assembly: Assembly) -> dict[str, int]:
    """The exchange's fields that evaluation needs, beside those of the plan."""
    return {"metrics": assembly.world.replicas * len(assembly.task.metrics), "stop": 1}


def assemble_evaluator(assembly: Assembly, exchange: Exchange, stop_requested: Callable[[], bool] = never) -> Evaluator:
    """Evaluation through the pipeline, with generation where the task generates.

    Args:
        exchange: with the fields of `assembly.codec` and `evaluation_fields`.
        stop_requested: of this worker, as it last heard: evaluations are then broken off.
    """
    a, machinery = assembly, _machinery(assembly, stop_requested)
    generation, generator = generation_settings(a.task), None
    if generation is not None:
        decoder, samples = _decoder(a, machinery, generation), a.settings.trainer.samples
        speaks = a.world.rank == 0
        generator = Generator(decoder, cast(Any, a.source), cast(Any, a.task), generation, samples, speaks)
    keeper = PredictionKeeper(a.world, cast(Any, a.task), a.source) if hasattr(a.task, "predictions") else None
    return Evaluator(machinery, a.source, a.task, a.cells, exchange, generator, keeper)


def assemble_decoder(assembly: Assembly, generation: GenerationSettings) -> Decoder:
    """Beam search through the pipeline; the cells must not be in training when it runs."""
    return _decoder(assembly, _machinery(assembly, never), generation)


def _machinery(assembly: Assembly, stop_requested: Callable[[], bool]) -> DecoderRuntime:
    a = assembly
    return DecoderRuntime(a.world, a.engine, a.schedules, a.codec, a.settings.pipeline.M, stop_requested)


def _decoder(assembly: Assembly, machinery: DecoderRuntime, generation: GenerationSettings) -> Decoder:
    marks = SpecialTokens(*assembly.survey.special, int(getattr(assembly.source, "pad_id", 0)))
    return Decoder(machinery, cast(Any, assembly.task), generation, marks)


def generation_settings(task: Task) -> GenerationSettings | None:
    """None for a task that generates nothing."""
    return getattr(task, "generation", None)


def open_source(
    settings: Settings, world: World, journal: Journal, stop_requested: Callable[[], bool]
) -> Source | None:
    """The data source on the workers that read it, prepared.

    Raises:
        ConfigurationError: it cannot be made.
        PlainError: somebody asked for an end meanwhile. Preparing may be ended anywhere; the next run goes on with it.
    """
    source = build_source(settings.data) if world.reads_data else None
    if source is not None and settings.trainer.epochs is not None and not hasattr(source, "epoch"):
        raise ConfigurationError(
            f"trainer.epochs={settings.trainer.epochs} but data._target_={settings.data['_target_']} has no method "
            "epoch(position), so nobody knows when one has passed: use trainer.steps"
        )

    def report(text: str, done: int, total: int) -> None:
        if stop_requested():
            raise PlainError("ended while the data were prepared: what is finished is kept for the next run")
        journal.preparation(text, done, total)

    prepare_in_turn(source, world, report)
    return source


def survey(
    builders: Sequence[LayerBuilder], settings: Settings, world: World, source: Source, say: Callable[[str], None]
) -> Survey:
    """Reads the first mini-batch and cuts the model; on rank 0."""
    parts = first_batch(source, settings.pipeline.M, world.replicas).micro_batches
    part = parts[0]
    profile = partial(profiled_costs, builders, part, settings, world.device, say)
    cut = cut_model(builders, settings.pipeline, world.workers, part, profile)
    special = int(getattr(source, "bos_id", 0)), int(getattr(source, "eos_id", 0))
    return Survey(BatchShape.of(part), cut, special, sum(len(inputs[0]) for inputs, _ in parts))


def whole_model(world: World, cells: Sequence[Cell]) -> tuple[dict[str, list[str]], list[str], list[int], list[int]]:
    """What all workers together hold.

    Returns:
        Parameter names by layer, a shared one under all its names; the full names of all parameters in layer order,
        each once; the places of this worker's among them; the indices of the layers with an auxiliary loss, and last
        `TASK`.
    """
    own = [name for cell in cells for name, _ in cell.parameters()]
    mine = [
        (layer.index, layer.name, list(named_tensors(layer.module)[0]), hasattr(layer.module, "auxiliary_loss"))
        for cell in cells
        for layer in cell.layers
    ]
    everyone = world.all_gather((own, mine))
    trained = {name for names, _ in everyone[: world.workers] for name in names}
    layers = sorted(layer for _, worker in everyone[: world.workers] for layer in worker)
    model = {name: parameters for _, name, parameters, _ in layers}
    losses = [index for index, _, _, has_loss in layers if has_loss] + [TASK]
    in_order = (f"{layer}.{parameter}" for layer, parameters in model.items() for parameter in parameters)
    names = [name for name in in_order if name in trained]
    place = {name: number for number, name in enumerate(names)}
    return model, names, [place[name] for name in own], losses


def make_transport(world: World, cut: Cut) -> Transport | None:
    """None where all cells live on one worker."""
    if world.workers == 1 or world.message_groups is None or world.all_ranks is None:
        return None
    ranks = tuple(world.rank_of(worker) for worker in cut.placement)
    return connect_workers(ranks, world.device, world.wire, world.message_groups, world.all_ranks, world.shared_memory)
