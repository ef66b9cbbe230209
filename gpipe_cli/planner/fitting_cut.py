"""Computes the bytes that workers would hold with some of the layers, so that cuts fit their memory."""

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate, starmap

import torch

from ..config import PipelineConfig, Settings
from ..factory.build import boundary_type_of, build_autocast, build_task
from ..layers import LayerBuilder, own_name
from ..micro_batch import MicroBatch
from ..partition.cost import LayerCost
from ..partition.cut import Cut, cut_by_costs
from ..partition.cutter import Memory, instruction_lists
from ..partition.fake_layers import CostError
from ..partition.tie_search import Ties
from ..schedule.instruction import Op
from ..schedule.schedule import most_kept
from .cells import cell_sizes
from .devices import parse_bytes
from .measure.layer_facts import LayerFacts, ModelFacts, measure_model
from .memory import Wire, messages_held, wire_of
from .memory_check import StateBytes, optimizer_state_bytes


def memory_of_workers(
    placement: tuple[int, ...],
    pipeline: PipelineConfig,
    model: ModelFacts,
    held: Sequence[float],
    limits: Sequence[float],
    wire: Wire,
) -> Memory:
    """Returns the memory of workers that hold their layers as one cell would.

    It is a little more than the plan of that cut says, where a worker has several cells: not all of them are at their
    worst at the same moment. Parameters that several layers share count in each.

    Args:
        placement: decides what is in flight.
        held: bytes of each layer's weights, gradients, optimizer state and averages.
        limits: bytes of each worker.
        wire: how messages travel.
    """
    lists = instruction_lists(pipeline, placement)
    kept, halves = [most_kept(each) for each in lists], any(i.op is Op.WEIGHT_GRADIENT for each in lists for i in each)
    waiting = [max(inputs.values()) for inputs, _ in kept]
    graphs = [max(graphs.values()) for _, graphs in kept]
    sums = [0.0, *accumulate(held)]

    @cache
    def activations(start: int, stop: int, waiting: int, graphs: int) -> float:
        is_last = stop == len(model.layers)
        own = model.with_loss[start:] if is_last else model.layers[start:stop]
        size = cell_sizes(own, model.layers[start - 1].boundary if start else model.inputs, model.target_bytes, is_last)
        working = size.working(graphs, halves) + pipeline.M * size.gathered + size.casts
        messages = size.by_message if start else size.by_message | {Op.RECEIVE_ACTIVATION: 0}
        working += sum(messages_held(messages, pipeline.M, len(lists), wire).values())
        if not start:
            return working + pipeline.M * size.message
        apart = size.targets if wire is Wire.SHARED_MEMORY else 0
        return working + waiting * (size.message - apart) + pipeline.M * size.targets

    def used(worker: int, start: int, stop: int) -> float:
        if stop == start:
            return 0.0
        return sums[stop] - sums[start] + activations(start, stop, waiting[worker], graphs[worker])

    return Memory(used, limits)


def held_bytes(settings: Settings, state_bytes: StateBytes, name: str, layer: LayerFacts) -> float:
    """Returns the bytes that a layer keeps between steps; ``state_bytes``: of the optimizer, for a parameter."""
    shapes = [shape for _, shape in layer.parameters]
    trained = [(own_name(name, each), shape) for each, shape in layer.parameters if each not in layer.frozen]
    held = sum(shape.bytes for shape in shapes) + sum(shape.bytes for _, shape in trained) + layer.buffer_bytes
    if settings.trainer.average is not None:
        held += sum(shape.bytes for shape in shapes) + layer.averaged_buffer_bytes
    shards = settings.pipeline.replicas if settings.pipeline.shard_optimizer else 1
    return held + sum(starmap(state_bytes, trained)) / shards


def limits_of_workers(pipeline: PipelineConfig, memory: float) -> list[float]:
    """Returns the bytes that each worker may hold, on devices of so much memory where the keys say nothing else."""
    if pipeline.memory is not None:
        memory = parse_bytes(pipeline.memory, "pipeline.memory")
    described = [each.get("memory") for each in pipeline.devices or [{}] * pipeline.worker_count]
    return [memory if each is None else parse_bytes(each, "pipeline.devices.memory") for each in described]


def cut_for_run(
    builders: Sequence[LayerBuilder],
    settings: Settings,
    example: MicroBatch,
    memory: float,
    costs: Sequence[LayerCost],
    ties: Ties,
) -> Cut:
    """Returns the cut of a run that fits, if any does: layers are measured on tensors without values.

    Args:
        example: a micro-batch; only its shapes matter.
        memory: bytes of each device, where the keys say nothing else.
    """
    pipeline, precision = settings.pipeline, settings.precision
    autocast, task = build_autocast(precision, torch.device("cpu")), build_task(settings.task, settings.seed)
    kernels = "accelerator" if torch.cuda.is_available() and pipeline.device != "cpu" else "cpu"
    inputs, targets = (tuple(torch.empty_like(tensor, device="meta") for tensor in side) for side in example)
    try:
        model = measure_model(builders, task.loss, (inputs, targets), autocast, boundary_type_of(precision), kernels)
    except CostError:  # what such layers hold is not known
        return cut_by_costs(builders, costs, pipeline, pipeline.worker_count, ties)
    names = [builder.name for builder in builders]
    held = list(map(partial(held_bytes, settings, optimizer_state_bytes(settings.optimizer)), names, model.layers))
    limits = limits_of_workers(pipeline, memory)
    wire = wire_of(pipeline, kernels == "cpu")
    memory_of = partial(memory_of_workers, pipeline=pipeline, model=model, held=held, limits=limits, wire=wire)
    return cut_by_costs(builders, costs, pipeline, pipeline.worker_count, ties, memory_of)
