"""Plants faults in BatchNorm's statistics, in the task's, and in what is reported of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe_cli.metrics.step_report import StepReport, StepReporter
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm, _SumOverReplicas, finish_batchnorm
from gpipe_cli.pipeline.engine import TASK, StepRecord, _TrainingStep
from gpipe_cli.trainer import update as weight_update
from gpipe_cli.trainer.update import Updater

from .fault import fault, replaced, run_training

Patch = AbstractContextManager[Any]
ALWAYS = "pipeline.remat=always"

# -- BatchNorm ---------------------------------------------------------------------------------------------------------


@fault(r"norm\.norm", "counted twice", ALWAYS)
def batchnorm_counted_twice() -> Patch:
    """Gathers the statistics again in recompute."""
    return run_training(lambda run, c, x, y, step, m, s, first: run(c, x, y, step, m, s, True))


@fault(r"norm\.norm", "moving averages.*never updated")
def averages_never_updated() -> Patch:
    """Leaves BatchNorm's moving averages as they begin."""

    def forget(finish: Any, layers: Any, replicas: Any) -> None:
        for layer in layers:
            layer.take_pooled()

    return replaced(weight_update, "finish_batchnorm", forget)


@fault(r"norm\.norm", "4 times")
def averages_updated_by_every_micro_batch() -> Patch:
    """Updates BatchNorm's moving averages after every micro-batch instead of once."""

    def at_once(gather: Any, norm: DeferredBatchNorm, *statistics: Any) -> None:
        gather(norm, *statistics)
        pooled = norm.take_pooled()
        if pooled is not None:
            norm.update_moving_averages(pooled)

    return replaced(DeferredBatchNorm, "_gather", at_once)


@fault(r"layer norm \(cell 1\)", "BatchNorm normalises by other statistics")
def statistics_of_another_micro_batch() -> Patch:
    """Normalises each micro-batch by the mean and variance of the one before."""
    last: dict[int, tuple[Tensor, Tensor]] = {}

    def normalise(forward: Any, norm: DeferredBatchNorm, x: Tensor) -> Tensor:
        if not norm.training:
            return forward(norm, x)  # type: ignore[no-any-return]
        dims = [0, *range(2, x.dim())]
        mine = x.detach().mean(dims), x.detach().var(dims)
        forward(norm, x)  # gathers
        mean, variance = last.get(id(norm), mine)
        last[id(norm)] = mine
        return F.batch_norm(x, mean, variance, norm.weight, norm.bias, False, 0.0, norm.eps)

    return replaced(DeferredBatchNorm, "forward", normalise)


@fault(r"layer norm \(cell 1\)", "its BatchNorm normalises by other statistics, or")
def recompute_by_moving_averages() -> Patch:
    """Normalises by the moving averages when a micro-batch is recomputed."""

    def normalise(forward: Any, norm: DeferredBatchNorm, x: Tensor) -> Tensor:
        if norm.gathering or not norm.training:
            return forward(norm, x)  # type: ignore[no-any-return]
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)

    return replaced(DeferredBatchNorm, "forward", normalise)


@fault(r"norm\.norm\.running_var", "n - 1 instead of n")
def variance_of_a_sample() -> Patch:
    """Averages the variance divided by n - 1 instead of n."""

    def sample(update: Any, norm: DeferredBatchNorm, pooled: Tensor) -> None:
        count, sums, squares = pooled
        mean = sums / count
        variance = (squares / count - mean * mean) * count / (count - 1)
        update(norm, torch.stack([count, sums, (variance + mean * mean) * count]))

    return replaced(DeferredBatchNorm, "update_moving_averages", sample)


@fault(r"norm\.norm", "9 times")
def momentum_reversed() -> Patch:
    """Takes the share of the old average for that of the new."""

    def reverse(update: Any, norm: DeferredBatchNorm, pooled: Tensor) -> None:
        kept = norm.momentum
        norm.momentum = 1 - (kept or 0.0)
        update(norm, pooled)
        norm.momentum = kept

    return replaced(DeferredBatchNorm, "update_moving_averages", reverse)


@fault(r"layer norm \(cell 1\)", "BatchNorm|evaluation mode")
def moving_averages_in_training() -> Patch:
    """Normalises by the moving averages in training, too."""

    def normalise(forward: Any, norm: DeferredBatchNorm, x: Tensor) -> Tensor:
        if norm.training:
            forward(norm, x)  # gathers
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)

    return replaced(DeferredBatchNorm, "forward", normalise)


@fault(r"norm\.norm", "replica", replicas=2)
def statistics_of_one_replica() -> Patch:
    """Updates each replica's moving averages by its own statistics."""
    return replaced(weight_update, "finish_batchnorm", lambda finish, layers, replicas: finish(layers, None))


@fault(
    r"between layer mix_0 \(cell 0\) and layer norm \(cell 1\)",
    "comes from the BatchNorm of layer norm",
    "pipeline.sync_batchnorm=true",
    "verify.dtype=float64",
    replicas=2,
)
def synchronised_backward_alone() -> Patch:
    """Shares BatchNorm's statistics over replicas in forward and not in backward."""

    def alone(backward: Any, ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clone(), None

    return replaced(_SumOverReplicas, "backward", alone)


@fault(r"norm\.norm", "instead of", "data.batch_size=14")
def mean_of_unequal_means() -> Patch:
    """Gives micro-batches of different sizes the same weight in BatchNorm's averages."""

    def alike(gather: Any, norm: DeferredBatchNorm, count: int, mean: Tensor, variance: Tensor) -> None:
        gather(norm, 1, mean, variance)

    return replaced(DeferredBatchNorm, "_gather", alike)


@fault(r"layer norm \(cell 1\)", "had to be skipped.*norm\\.norm")
def averages_updated_by_a_skipped_step() -> Patch:
    """Updates BatchNorm's moving averages in a step that is not finite, too."""

    def update(function: Any, updater: Updater, report: StepReport, *rest: Any) -> None:
        if not report.finite:
            finish_batchnorm(updater._batchnorms, None)
        function(updater, report, *rest)

    return replaced(Updater, "update", update)


# -- loss and report ---------------------------------------------------------------------------------------------------


@fault("micro-batches 0, 1, 2, 3", "targets")
def targets_of_another_micro_batch() -> Patch:
    """Scores every micro-batch against the targets of the next."""

    def score(function: Any, step: _TrainingStep, outputs: Any, micro_batch: int) -> Tensor:
        return function(step, outputs, (micro_batch + 1) % 4)  # type: ignore[no-any-return]

    return replaced(_TrainingStep, "_score", score)


@fault(
    "loss of the mini-batch|the loss", "losses of (all )?micro-batches agree|mean of the means", "data.batch_size=14"
)
def reported_mean_of_means() -> Patch:
    """Reports the mean of the micro-batches' means as the loss of the mini-batch."""

    def read(function: Any, reporter: StepReporter, exchange: Any, total_weight: float) -> StepReport:
        from dataclasses import replace

        report = function(reporter, exchange, total_weight)
        weights = exchange.total["plan_weights"].tolist()
        losses = [loss for row in report.losses for loss in row]
        means = [loss / weight for loss, weight in zip(losses, weights, strict=True) if weight]
        reported: StepReport = replace(report, loss=sum(means) / len(means))
        return reported

    # The weights that the exchange holds by then are those of the next mini-batch: wrong twice, as such faults are.
    return replaced(StepReporter, "read", read)


def _reported_losses(change: Callable[[dict[tuple[int, int], Tensor]], dict[tuple[int, int], Tensor]]) -> Patch:
    """Changes the losses that are reported, by (layer, micro-batch)."""

    def write(function: Any, reporter: StepReporter, exchange: Any, replica: int, record: StepRecord) -> None:
        function(reporter, exchange, replica, StepRecord(change(record.losses), record.statistics))

    return replaced(StepReporter, "write_record", write)


@fault("micro-batch 0", "that of micro-batch 1|exchanged")
def reported_losses_exchanged() -> Patch:
    """Reports the losses of micro-batches 0 and 1 for each other."""
    other = {0: 1, 1: 0}
    return _reported_losses(lambda losses: {(layer, other.get(m, m)): loss for (layer, m), loss in losses.items()})


@fault("loss", "twice|2 times|counted", ALWAYS)
def auxiliary_loss_reported_twice() -> Patch:
    """Adds the auxiliary loss of the forward that is recomputed to the reported loss once more."""
    return _reported_losses(lambda losses: {at: loss * (1 if at[0] == TASK else 2) for at, loss in losses.items()})


@fault("right|tokens", "statistics")
def statistics_of_the_last_micro_batch() -> Patch:
    """Reports the task's statistics of the last micro-batch as those of the mini-batch."""

    def forget(score: Any, step: _TrainingStep, *arguments: Any) -> Any:
        step.record.statistics = None
        return score(step, *arguments)

    return replaced(_TrainingStep, "_score", forget)


@fault("gradient norm|norm", "cell 3")
def norm_of_one_cell() -> Patch:
    """Takes the norm of the last cell's gradients for that of all."""

    def write(function: Any, reporter: StepReporter, exchange: Any, numbers: Any, squares: Tensor) -> None:
        only = squares.clone()
        only[:-2] = 0  # all but the head's weight and bias
        function(reporter, exchange, numbers, only)

    return replaced(StepReporter, "write_norms", write)


@fault("norm", r"1\.414", replicas=2)
def norm_counts_every_replica() -> Patch:
    """Adds the squared norms of all replicas, which hold the same gradients."""
    return replaced(
        StepReporter, "write_norms", lambda function, r, e, numbers, squares: function(r, e, numbers, squares * 2)
    )
