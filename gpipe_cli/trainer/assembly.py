"""Assembles one worker's side of a run from the configuration: data source, model, cells, engine, evaluator, decoder.

Every command that runs the pipeline begins here; `run.py` adds what training needs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..checkpoint.compatibility import require_same_vocabularies, vocabularies
from ..checkpoint.files import CheckpointError, CheckpointInfo, open_checkpoint, shorten
from ..checkpoint.layer_state import LayerState, load_layer, restore_layer
from ..config import PipelineConfig, Settings
from ..data.source import Batch, Source
from ..decoding.decoding import Decoder, SpecialTokens, TranslationForm
from ..distributed.pipeline import WorkerPipeline, make_transport
from ..distributed.step_message import BatchShape
from ..distributed.world import World, join_world
from ..errors import ConfigurationError
from ..factory.build import boundary_type_of, build_autocast, build_model, build_task, refuse_wrong_values
from ..factory.example import asks_for_example, with_example
from ..factory.groups import Groups
from ..gpus import GPU
from ..launch.context import Context
from ..layers import LayerBuilder
from ..metrics.journal import Notices
from ..micro_batch import MicroBatch
from ..partition.cut import Cut, cut_model, refuse_more_cells_than_layers
from ..partition.partition import even_placement
from ..pipeline.gradients import sum_over_replicas
from ..planner.fitting_cut import cut_for_run
from ..planner.kept import memory_of, refuse_too_large
from ..planner.measure.kept_profile import profiled
from ..planner.measure.this_device import free_memory_of_gpu, room_for_tensors, workers_on_a_gpu
from ..tasks.base import GenerationSettings, Task
from .batches import first_batch, open_source
from .evaluator import Evaluator

# -- what an assembly consists of --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assembly:
    """Holds one worker's side of a run.

    Attributes:
        source: the data source, on the first worker of each replica; None elsewhere.
        tokens: the source's special tokens; zeros if it has none.
        builders: builders of all layers.
    """

    settings: Settings
    source: Source | None
    tokens: SpecialTokens
    builders: Sequence[LayerBuilder]
    pipeline: WorkerPipeline

    @property
    def world(self) -> World:
        """Returns this process's rank, replica, device and process groups."""
        return self.pipeline.world


# -- for every command -------------------------------------------------------------------------------------------------


def start_worker(context: Context, settings: Settings) -> World:
    """Sets the number of threads and joins the other workers; every worker calls it at the same time.

    Raises:
        ValueError: the number of workers is not a multiple of `pipeline.replicas`.
        ConfigurationError: a value of model, data, task, optimizer or lr_schedule is wrong.
    """
    refuse_wrong_values(settings)
    pipeline = settings.pipeline
    if pipeline.auto:
        keys = " ".join(f"pipeline.{key}=auto" for key in pipeline.auto)
        raise ConfigurationError(f"{keys}: gpipe-train and gpipe-plan choose these, type values here")
    torch.set_num_threads(pipeline.threads)  # torchrun sets another number, and the last bits depend on it
    workers = context.world_size // pipeline.replicas
    if pipeline.placement == "replicas_inside" and context.messenger is None:  # its launcher counts node by node
        context = replace(context, rank=context.rank % pipeline.replicas * workers + context.rank // pipeline.replicas)
    return join_world(context, workers, pipeline.replicas, pipeline.device, pipeline.backend)


def assemble_model(
    context: Context, settings: Settings, world: World, task: Task, journal: Notices, trains: bool = True
) -> Assembly:
    """Opens the data, builds this worker's cells and the engine; every worker calls it at the same time.

    Args:
        trains: False where neither gradients nor optimizer are needed.

    Raises:
        ConfigurationError: something in the configuration that shows only now.
    """
    config, builders = settings.pipeline, None
    if not asks_for_example(settings.model):  # before a corpus is prepared, which takes minutes
        builders = list_layers(context, settings, world, trains, journal.message)
    with context.where.doing("preparing the data"):
        source = open_source(context, settings, world, journal)
    with context.where.doing("reading the first mini-batch"):
        read = first_batch(cast(Source, source), config.M, world.replicas) if world.rank == 0 else None
    if builders is None:
        model = world.broadcast(lambda: with_example(settings, cast(Batch, read).micro_batches[0][0]))
        settings = replace(settings, model=model)
        builders = list_layers(context, settings, world, trains, journal.message)
    with context.where.doing("cutting the model"):
        shape, tokens, cut = describe_and_cut(builders, settings, world, source, read, journal.message)
    if trains:
        journal.cells(cut.table)
    autocast, between = build_autocast(settings.precision, world.device), boundary_type_of(settings.precision)
    pipeline = WorkerPipeline(
        builders, cut, config, task, shape, world, settings.seed, autocast, between, context.where
    )
    if trains:
        fewest = None if source is None else source.fewest_examples(config.M * world.replicas)
        _warn_of_single_examples(pipeline, config.sync_batchnorm, read, fewest, journal)
    return Assembly(settings, source, tokens, builders, pipeline)


def _warn_of_single_examples(
    pipeline: WorkerPipeline, synchronised: bool, read: Batch | None, fewest: int | None, journal: Notices
) -> None:
    """Warns if BatchNorm sees one example at a time; every worker calls it at the same time.

    Args:
        synchronised: replicas share BatchNorm's statistics.
        read: the first mini-batch, on rank 0; None elsewhere.
        fewest: examples of an epoch's smallest micro-batch; None: not known.

    Raises:
        ConfigurationError: only the last micro-batch of an epoch has a single example; the run would fail there.
    """
    cells = pipeline.world.gather_from_workers(cell.number for cell in pipeline.cells if cell.batchnorms)
    if not cells or not read or (synchronised and pipeline.world.replicas > 1):
        return
    if min(len(inputs[0]) for inputs, _ in read.micro_batches) > 1:
        if fewest == 1:
            raise ConfigurationError(
                "an epoch's last mini-batch has a micro-batch of a single example, which BatchNorm cannot normalise: "
                "set data.drop_last=true, or another data.batch_size"
            )
    else:
        journal.warn(
            "a micro-batch has a single example, so in training BatchNorm normalises over the places of one example "
            "only, and evaluation will look different: lower pipeline.M or raise data.batch_size"
        )


def list_layers(
    context: Context, settings: Settings, world: World, trains: bool, say: Callable[[str], None]
) -> list[LayerBuilder]:
    """Makes the model's list of layers.

    Raises:
        ConfigurationError: it cannot be made, has fewer layers than cells, or, as only rank 0 checks, does not fit the
            memory.
    """
    with context.where.doing("listing the model's layers"):
        builders, groups = build_model(settings.model, settings.seed), Groups(settings.optimizer)
        refuse_more_cells_than_layers(len(builders), settings.pipeline)
        if trains:
            builders = groups.frozen_in(builders)
        if world.rank == 0:
            if trains and groups.entries:
                say(groups.told(builders))
            one_machine = context.messenger is not None or world.size == 1
            refuse_too_large(builders, settings, memory_of(world, one_machine, settings.pipeline), trains)
    return builders


def describe_and_cut(
    builders: Sequence[LayerBuilder],
    settings: Settings,
    world: World,
    source: Source | None,
    read: Batch | None,
    say: Callable[[str], None],
) -> tuple[BatchShape, SpecialTokens, Cut]:
    """Describes the data and cuts the model by their shapes, on rank 0; returns the same on every rank.

    Args:
        read: the first mini-batch, on rank 0; None elsewhere.

    Returns:
        (dimensions of a micro-batch's tensors, special tokens, cut).
    """

    memory = memory_of_workers(settings, world)

    def make() -> list[Any]:
        assert source is not None and read is not None
        example = read.micro_batches[0]
        usual = usual_micro_batch(source, example, settings.pipeline)
        profile = partial(profiled, builders, usual, settings, world.device, say)
        fitted = None if memory is None else partial(cut_for_run, builders, settings, example, memory)
        cut = cut_model(builders, settings.pipeline, world.workers, usual, profile, say, fitted)
        shape = BatchShape.of(example)
        return [[shape.inputs, shape.targets], [source.bos_id, source.eos_id, source.pad_id], asdict(cut)]

    sides, tokens, cut = world.broadcast(make)
    return BatchShape(*map(tuple, sides)), SpecialTokens(*tokens), Cut.from_json(cut)


def usual_micro_batch(source: Source, first: MicroBatch, pipeline: PipelineConfig) -> MicroBatch:
    """Returns a micro-batch of the shapes that are usual in the data, by which the model is cut.

    The sentences of the first micro-batch may be unusually short on one side. It is returned all the same if the source
    would have to read data to find the usual shapes.
    """
    if not source.knows_typical_shapes:
        return first
    (inputs, targets), _ = source.typical_micro_batch(pipeline.M * pipeline.replicas, False)
    shapes = [tensor.shape for side in (inputs, targets) for tensor in side]
    if shapes == [tensor.shape for side in first for tensor in side]:
        return first
    return _ones(inputs, first[0]), _ones(targets, first[1])


def _ones(shapes: Sequence[Tensor], types: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns tensors of ones with these tensors' shapes and types."""
    return tuple(torch.ones(shape.shape, dtype=of.dtype) for shape, of in zip(shapes, types, strict=True))


def memory_of_workers(settings: Settings, world: World) -> list[float] | None:
    """Returns the bytes that each worker's device has for tensors; every worker calls it at the same time.

    On GPUs each worker has the least of all replicas. The communicators are made first, because they take memory. On
    CPUs without a configured limit there is nothing to look at, and the result is None.
    """
    pipeline = settings.pipeline
    if world.device.type == GPU:
        if world.wire.type == GPU:
            make_transport(world, even_placement(pipeline, world.workers))
        if world.replica_group is not None:
            sum_over_replicas(torch.zeros(1, device=world.wire), world.replica_group)
        free = world.all_gather(free_memory_of_gpu(world.device))
        sharing = workers_on_a_gpu(pipeline, world.size)
        return [room_for_tensors(min(free[worker :: world.workers]), sharing) for worker in range(world.workers)]
    typed = pipeline.memory is not None or any("memory" in device for device in pipeline.worker_devices or ())
    return [inf] * world.workers if typed else None


# -- for evaluation and translation ------------------------------------------------------------------------------------


def assemble_from_checkpoint(context: Context, config: Mapping[str, Any]) -> Assembly:
    """Assembles a checkpoint's model with its weights, in evaluation mode; every worker calls it at the same time.

    The weights are those that evaluation used in the run: the moving averages where `trainer.average` was set.

    Args:
        config: "settings", the resolved configuration (jobs/reopen.py makes it), and "checkpoint", the path
            of one checkpoint.

    Raises:
        ConfigurationError: the checkpoint is of another model, or something in the configuration that shows only now.
    """
    settings = Settings.from_config(config["settings"])
    world = start_worker(context, settings)
    info = open_checkpoint(Path(config["checkpoint"]))
    notices, task = Notices(context.emit, world.rank == 0), build_task(settings.task, settings.seed)
    assembly = assemble_model(context, settings, world, task, notices, trains=False)
    if world.rank == 0:
        require_same_vocabularies(info, vocabularies(assembly.source))
    load_same_model(info, assembly)
    for cell in assembly.pipeline.cells:
        cell.train(False)
    return assembly


def load_same_model(info: CheckpointInfo, assembly: Assembly) -> None:
    """Loads weights, or their averages, and buffers of a checkpoint of this very model into this worker's layers.

    Raises:
        CheckpointError: the model is another one, or a file is damaged.
    """
    if differing := info.layers.keys() ^ {builder.name for builder in assembly.builders}:
        raise CheckpointError(
            f"{info.path} was made with another model, with other layers: {shorten(sorted(differing))}: give the model "
            "settings (model.*) it was made with"
        )
    averages = assembly.settings.trainer.average is not None
    for layer in assembly.pipeline.layers:
        saved = load_layer(info, layer.name)
        own = saved.averaged if averages else {**saved.weights, **saved.buffers}
        state = LayerState({name: own[name] for name in saved.weights}, {name: own[name] for name in saved.buffers})
        restore_layer(layer.name, layer.module, None, state)


def assemble_evaluator(assembly: Assembly, stop_requested: Callable[[], bool] = lambda: False) -> Evaluator:
    """Makes the evaluator, with generation where the task generates.

    Args:
        stop_requested: returns True if this worker was asked to stop; evaluations then end early.
    """
    generation = assembly.pipeline.task.generation
    decoder = None if generation is None else assemble_decoder(assembly, generation, stop_requested)
    samples = assembly.settings.trainer.samples
    return Evaluator(assembly.pipeline, assembly.source, stop_requested, decoder, samples)


def assemble_decoder(
    assembly: Assembly, generation: GenerationSettings, stop_requested: Callable[[], bool] = lambda: False
) -> Decoder:
    """Makes the beam search through the pipeline; the cells must be in evaluation mode when it runs."""
    form = TranslationForm(assembly.pipeline.task, generation, assembly.tokens)
    return Decoder(assembly.pipeline, form, stop_requested)
