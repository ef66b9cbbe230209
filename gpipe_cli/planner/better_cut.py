"""Finds the cut whose slowest worker is fastest, by the times of layers and by what the schedule recomputes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..config import PipelineConfig
from ..errors import ConfigurationError
from ..partition.cut import Cut
from ..partition.layer_times import LayerTimes
from ..partition.partition import partition
from ..schedule.instruction import Op
from ..schedule.schedule import schedule

LEAST_GAIN = 0.01


def better_cut(
    times: Sequence[LayerTimes], pipeline: PipelineConfig, cut: Cut, cut_by_sizes: Callable[[PipelineConfig], Cut]
) -> tuple[list[int] | None, float]:
    """Returns the sizes of the better cut's cells, and by how much its slowest worker is faster, as a share.

    Every cell counts with the share of micro-batches that the first recomputes.

    None and 0 where that is less than `LEAST_GAIN`, or where a run would refuse the cut because the shapes of what
    crosses it depend on values.

    Args:
        times: of each layer; those of the loss in the last.
        cut_by_sizes: makes the cut of a section with sizes as its `partition`, or raises ConfigurationError.
    """
    share = _recomputed_shares(pipeline, cut.placement)[0]
    sizes = partition(_seconds(times, share), pipeline.K, "min_max")
    try:
        other = cut_by_sizes(replace(pipeline, partition=sizes))
    except ConfigurationError:
        return None, 0.0
    best = _slowest_worker(times, pipeline, other)
    gain = _slowest_worker(times, pipeline, cut) / best - 1 if best else 0.0
    return (sizes, gain) if gain >= LEAST_GAIN else (None, 0.0)


def _recomputed_shares(pipeline: PipelineConfig, placement: Sequence[int]) -> list[float]:
    """Returns the share of the micro-batches that each cell recomputes."""
    recomputed = [0] * len(placement)
    for instructions in schedule(pipeline.schedule, tuple(placement), pipeline.M, pipeline.remat):
        for instruction in instructions:
            recomputed[instruction.cell] += instruction.op is Op.RECOMPUTE
    return [count / pipeline.M for count in recomputed]


def _seconds(times: Sequence[LayerTimes], recomputed: float) -> list[float]:
    return [layer.total + recomputed * layer.recompute for layer in times]


def _slowest_worker(times: Sequence[LayerTimes], pipeline: PipelineConfig, cut: Cut) -> float:
    """Returns its seconds for one micro-batch in all its cells."""
    seconds = [0.0] * (max(cut.placement) + 1)
    shares = _recomputed_shares(pipeline, cut.placement)
    for layers, worker, share in zip(cut.layers, cut.placement, shares, strict=True):
        seconds[worker] += sum(_seconds([times[layer] for layer in layers], share))
    return max(seconds)
