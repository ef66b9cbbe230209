"""Computes the bytes that workers would hold with some of the layers, so that cuts fit their memory."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from ..config import PipelineConfig, Settings
from ..factory.build import build_task
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch
from ..partition.cost import LayerTimes
from ..partition.cut import Cut, cut_by_times
from ..partition.cutter import Memory, instruction_lists
from ..partition.partition import even_placement
from ..schedule.instruction import Op
from ..schedule.schedule import most_kept
from .cells import sizes_of_cell
from .kept import KeptMemory
from .measure.layer_facts import ModelFacts, measure_model
from .measure.this_device import present_device
from .memory import PROCESS, messages_held


def limits_of_workers(pipeline: PipelineConfig, memory: Sequence[float]) -> list[float]:
    """Returns the most bytes of each worker: as configured, else its device's.

    Args:
        memory: bytes of each worker's device.
    """
    devices = pipeline.worker_devices or [{}] * len(memory)
    typed = [device.get("memory", pipeline.memory) for device in devices]
    return [there if own is None else own for own, there in zip(typed, memory, strict=True)]


def cut_that_fits(
    model: ModelFacts,
    times: Sequence[LayerTimes],
    pipeline: PipelineConfig,
    kept: KeptMemory,
    limits: Sequence[float],
    on_cpus: bool,
) -> Cut:
    """Returns the cut with the shortest step that fits the workers' memory; the shortest of all if none fits.

    A worker is taken to hold its layers as one cell would. For a worker with several cells that is a little more than
    its plan says, because not all of them are at their worst at the same moment. Parameters that several layers share
    count in each.

    Args:
        times: times of each layer.
        kept: counts the bytes that layers keep between steps.
        limits: most bytes of each worker.
        on_cpus: True if messages travel through shared memory; else from GPU to GPU.
    """
    lists = instruction_lists(pipeline, even_placement(pipeline, pipeline.worker_count))
    halves = any(i.op is Op.WEIGHT_GRADIENT for each in lists for i in each)
    most = [tuple(max(of_cells.values()) for of_cells in most_kept(each)) for each in lists]
    sums = [0.0, *accumulate(kept.of_layers(model, pipeline))]

    @cache
    def activations(start: int, stop: int, inputs: int, graphs: int) -> float:
        size = sizes_of_cell(model, range(start, stop))
        working = size.working(graphs, halves) + pipeline.M * size.gathered + size.casts
        messages = size.by_message if start else size.by_message | {Op.RECEIVE_ACTIVATION: 0}
        working += sum(messages_held(messages, pipeline.M, len(lists), on_cpus).values())
        if not start:
            return working + pipeline.M * size.message
        apart = size.targets if on_cpus else 0
        return working + inputs * (size.message - apart) + pipeline.M * size.targets

    def used(worker: int, start: int, stop: int) -> float:
        if stop == start:
            return 0.0
        return sums[stop] - sums[start] + on_cpus * PROCESS + activations(start, stop, *most[worker])

    return cut_by_times(model, times, pipeline, pipeline.worker_count, Memory(used, limits))


def cut_for_run(
    builders: Sequence[LayerBuilder],
    settings: Settings,
    example: MicroBatch,
    memory: Sequence[float],
    times: Sequence[LayerTimes],
) -> Cut:
    """Returns the cut of a run, as `cut_that_fits`; the layers' bytes are measured on tensors without values.

    Args:
        example: a micro-batch; only its shapes matter.
        memory: bytes of each worker's device.
        times: times of each layer.
    """
    pipeline, task = settings.pipeline, build_task(settings.task, settings.seed)
    on_cpus = present_device(pipeline).type == "cpu"
    model = measure_model(builders, task.loss, example, settings.precision, "cpu" if on_cpus else "accelerator")
    if model.failure is not None:  # what such layers hold is not known
        return cut_by_times(model, times, pipeline, pipeline.worker_count)
    limits = limits_of_workers(pipeline, memory)
    return cut_that_fits(model, times, pipeline, KeptMemory(settings), limits, on_cpus)
