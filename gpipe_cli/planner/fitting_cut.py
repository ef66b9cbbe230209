"""Makes cuts that fit the memory of the workers, by what each would hold with some of the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, starmap

import torch

from ..config import PipelineConfig, Settings
from ..factory.build import boundary_type_of, build_autocast, build_task
from ..factory.memory_check import StateBytes, optimizer_state_bytes
from ..layers import LayerBuilder, own_name
from ..micro_batch import MicroBatch
from ..partition.balance import Bytes
from ..partition.cost import LayerCost
from ..partition.cut import Cut, cut_by_costs
from ..partition.fake_layers import CostError
from ..partition.tie_search import Ties
from ..schedule.instruction import Op
from ..schedule.schedule import kept_graphs, most_kept, schedule
from .cells import cell_sizes
from .devices import parse_bytes
from .measure.layer_facts import LayerFacts, ModelFacts, measure_model

MESSAGES = 0.02  # of the bytes of a worker, at most: `bytes_of_workers` leaves out those on their way


def cut_that_fits(
    builders: Sequence[LayerBuilder],
    costs: Sequence[LayerCost],
    ties: Ties,
    pipeline: PipelineConfig,
    limits: Sequence[float],
    bytes_of: Callable[[Cut], Bytes],
) -> Cut:
    """Returns the cut with the shortest step and, if any cut fits the workers, one that does.

    Args:
        limits: bytes of each worker.
        bytes_of: returns the bytes of a worker with some layers, for the placement of a cut.

    Raises:
        ConfigurationError: as in `cut_by_costs`.
    """
    cut = cut_by_costs(builders, costs, pipeline, pipeline.worker_count, ties)
    if pipeline.partition != "auto" or pipeline.worker_count == 1:
        return cut
    bytes_ = bytes_of(cut)

    def used(cut: Cut) -> list[float]:
        """Returns the bytes of each worker."""
        total = [0.0] * pipeline.worker_count
        for layers, worker in zip(cut.layers, cut.placement, strict=True):
            total[worker] += bytes_(worker, layers.start, layers.stop)
        return total

    def fullest(cut: Cut) -> float:
        """Returns the largest share that a worker uses of its limit."""
        return max(most / limit for most, limit in zip(used(cut), limits, strict=True))

    if sum(used(cut)) > sum(limits) or (1 + MESSAGES) * fullest(cut) <= 1:
        return cut  # another would not fit, or need not
    fitting = cut_by_costs(builders, costs, pipeline, pipeline.worker_count, ties, bytes_, limits)
    return min(cut, fitting, key=fullest)


def bytes_of_workers(cut: Cut, pipeline: PipelineConfig, model: ModelFacts, held: Sequence[float]) -> Bytes:
    """Returns the function for the most bytes of a worker with the layers start to stop - 1, as of one cell.

    It is a little more than the plan of that cut says, where a worker has several cells: not all of them are at their
    worst at the same moment. Parameters that several layers share count in each.

    Args:
        cut: its placement decides what is in flight.
        held: bytes of each layer's weights, gradients, optimizer state and averages.
    """
    keep = kept_graphs(pipeline.policy, pipeline.K, pipeline.M)
    lists = schedule(pipeline.schedule, cut.placement, pipeline.M, keep)
    kept, halves = [most_kept(each) for each in lists], any(i.op is Op.WEIGHT_GRADIENT for each in lists for i in each)
    waiting = [max(each.inputs.values()) for each in kept]
    graphs = [max(each.graphs.values()) for each in kept]
    sums = [0.0, *accumulate(held)]

    @cache
    def activations(start: int, stop: int, waiting: int, graphs: int) -> float:
        is_last = stop == len(model.layers)
        own = model.with_loss[start:] if is_last else model.layers[start:stop]
        size = cell_sizes(own, model.layers[start - 1].boundary if start else model.inputs, model.target_bytes, is_last)
        graph = size.graph + size.outputs
        backward, left = graph + size.backward, graph
        if halves and size.put_off:
            backward = max(graph + size.input_half, size.put_off + size.weight_half)
            left = max(graph, size.put_off)
        working = (graphs - 1) * left + max(size.forward, backward)
        gathered = pipeline.M * size.gathered + size.casts
        return gathered + working + (waiting if start else pipeline.M) * size.message

    def bytes_(worker: int, start: int, stop: int) -> float:
        if stop == start:
            return 0.0
        return sums[stop] - sums[start] + activations(start, stop, waiting[worker], graphs[worker])

    return bytes_


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
    bytes_of = partial(bytes_of_workers, pipeline=pipeline, model=model, held=held)
    return cut_that_fits(builders, costs, ties, pipeline, limits_of_workers(pipeline, memory), bytes_of)
