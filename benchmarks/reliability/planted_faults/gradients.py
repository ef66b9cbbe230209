"""Plants faults in backward, in how gradients are scaled and added up, and in their sum over replicas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.distributed import runtime
from gpipe_cli.distributed.batch_plan import BatchPlanCodec
from gpipe_cli.pipeline import gradients
from gpipe_cli.pipeline.engine import Graph, StepInput, _TrainingStep
from gpipe_cli.schedule.instruction import Instruction, Op
from gpipe_cli.trainer import update as weight_update
from gpipe_cli.trainer.update import Updater

from .fault import around_backward, cell_parameters, fault, handlers_replaced, replaced

Patch = AbstractContextManager[Any]
M = 4
NO_AUXILIARY = ("model.auxiliary=false", "pipeline.partition=[2,1,2,1]")  # nothing but the boundary reaches layer norm
BOUNDARY = r"between layer norm \(cell 1\) and layer mix_2 \(cell 2\)"

# -- scale -------------------------------------------------------------------------------------------------------------


@fault("all parameters|all layers", "scaled by M = 4")
def scaled_by_m() -> Patch:
    """Takes the sum of the micro-batches' means for the mean: gradients M times too large."""

    def scaled(new: Any, step: int, steps: int, signatures: Any, scale: float) -> StepInput:
        return StepInput(step, steps, signatures, scale * M)

    return replaced(runtime, "StepInput", scaled)


@fault("cell 2.*cell 3", "divided by M = 4")
def scaled_again_by_every_cell() -> Patch:
    """Divides by M once more in every earlier cell: cell k gets 1/M^(K-k)."""
    return _gradients_taken(lambda i, gradients: tuple(gradient / M for gradient in gradients))


@fault("all parameters", "divided by the number of replicas = 2", replicas=2)
def mean_over_replicas() -> Patch:
    """Averages over replicas what has already been divided by the weight of the whole mini-batch."""

    def mean(reduce: Any, parameters: Any, group: Any) -> None:
        reduce(parameters, group)
        for parameter in parameters:
            parameter.grad /= group.size()

    return replaced(weight_update, "reduce_over_replicas", mean)


@fault("micro-batch", "mean of its own", "data.batch_size=14")
def uneven_means() -> Patch:
    """Averages the means of micro-batches that have different numbers of tokens."""

    def scale(step: _TrainingStep, i: Instruction) -> float:
        kept, step.scale = step.scale, 1 / (M * float((step.buffers.targets[i.micro_batch][0] != 0).sum()))
        return kept

    def restore(step: _TrainingStep, i: Instruction, kept: float) -> None:
        step.scale = kept

    return around_backward(scale, restore)


@fault("losses of all micro-batches agree", "divided by a weight of 80 instead of 77")
def padding_counted() -> Patch:
    """Divides by the number of all tokens, padding among them."""

    def count(write: Any, codec: BatchPlanCodec, exchange: Any, micro_batches: Any, weights: Any) -> None:
        write(codec, exchange, micro_batches, [float(targets[0].numel()) for _, targets in micro_batches])

    return replaced(BatchPlanCodec, "write", count)


# -- what is added up --------------------------------------------------------------------------------------------------


@fault("micro-batches 1, 2, 3", "left out")
def only_one_micro_batch() -> Patch:
    """Loses the accumulation: only the micro-batch whose backward comes last is left."""

    def clear(step: _TrainingStep, i: Instruction) -> None:
        for parameter in cell_parameters(step, i.cell):
            parameter.grad = None

    return around_backward(clear)


def _added_again(cell: int, micro_batch: int, share: float) -> Patch:
    def before(step: _TrainingStep, i: Instruction) -> list[Tensor]:
        found = [p.grad for p in cell_parameters(step, i.cell)]
        return [torch.zeros(()) if gradient is None else gradient.clone() for gradient in found]

    def after(step: _TrainingStep, i: Instruction, kept: list[Tensor]) -> None:
        if (i.cell, i.micro_batch) == (cell, micro_batch):
            for parameter, old in zip(cell_parameters(step, cell), kept, strict=True):
                if parameter.grad is not None:
                    parameter.grad += share * (parameter.grad - old)

    return around_backward(before, after)


@fault(r"cell 2.*micro-batch 0|micro-batch 0.*cell 2", "counts 2 times")
def first_micro_batch_twice() -> Patch:
    """Adds the gradients of the first micro-batch twice in cell 2."""
    return _added_again(2, 0, 1.0)


@fault(r"cell 1.*micro-batch 3|micro-batch 3.*cell 1", "left out")
def micro_batch_forgotten() -> Patch:
    """Forgets the gradients of the last micro-batch in cell 1."""
    return _added_again(1, 3, -1.0)


@fault(r"cell 2.*micro-batch 1|micro-batch 1.*cell 2", "left out", "pipeline.schedule=zero_bubble")
def weight_half_lost() -> Patch:
    """Loses the second half of one backward of cell 2."""

    def lose(run: Any, step: _TrainingStep, i: Instruction) -> None:
        if (i.cell, i.micro_batch) == (2, 1):
            step.buffers.weight_halves.pop((2, 1))
        else:
            run(step, i)

    return handlers_replaced(lose, Op.WEIGHT_GRADIENT)


@fault("all layers", "step before")
def gradients_not_cleared() -> Patch:
    """Leaves the gradients of the step before in place."""

    def keep(update: Any, updater: Updater, *arguments: Any) -> None:
        kept = [(p, p.grad.clone()) for p in updater._parameters if p.grad is not None]
        update(updater, *arguments)
        for parameter, gradient in kept:
            parameter.grad = gradient

    return replaced(Updater, "update", keep)


@fault(r"mix_2\.linear\.bias", "zero")
def gradient_of_one_parameter_lost() -> Patch:
    """Loses the gradient of one bias."""

    def fill(fill_gradients: Any, parameters: list[nn.Parameter]) -> None:
        fill_gradients(parameters)
        biases = [p for p in parameters if p.dim() == 1 and p.grad is not None]
        assert biases[4].grad is not None
        biases[4].grad.zero_()  # mix_0, norm (2), judge, then mix_2

    return replaced(weight_update, "fill_gradients", fill)


@fault(r"cell 1", "rounded to bfloat16")
def accumulated_in_bfloat16() -> Patch:
    """Adds the gradients of micro-batches up in bfloat16, in cell 1."""

    def narrow(step: _TrainingStep, i: Instruction, kept: None) -> None:
        for parameter in cell_parameters(step, 1):
            if parameter.grad is not None:
                parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)

    return around_backward(lambda step, i: None, narrow)


# -- what flows back ---------------------------------------------------------------------------------------------------


Gradients = tuple[Tensor, ...]


def _gradients_taken(change: Callable[[Instruction, Gradients], Gradients]) -> Patch:
    """Changes the gradients that come back to a cell."""

    def take(function: Any, step: _TrainingStep, i: Instruction) -> Gradients:
        return change(i, function(step, i))

    return replaced(_TrainingStep, "_take_output_gradients", take)


@fault(f"{BOUNDARY}.*micro-batch 2", "it is zero", *NO_AUXILIARY)
def boundary_gradient_dropped() -> Patch:
    """Drops the gradient that comes back to cell 1 for micro-batch 2."""
    return _gradients_taken(lambda i, g: tuple(map(torch.zeros_like, g)) if (i.cell, i.micro_batch) == (1, 2) else g)


@fault(f"{BOUNDARY}.*micro-batch 1", "it is that of micro-batch 2", *NO_AUXILIARY)
def stale_gradient_buffer() -> Patch:
    """Gives cell 1 for micro-batch 1 the gradient that came for micro-batch 2."""
    last: dict[int, Gradients] = {}

    def keep(i: Instruction, gradients: Gradients) -> Gradients:
        if i.cell == 1:
            last[i.micro_batch] = tuple(gradient.clone() for gradient in gradients)
        return last[2] if (i.cell, i.micro_batch) == (1, 1) else gradients

    return _gradients_taken(keep)


@fault(BOUNDARY, r"0\.5 times", *NO_AUXILIARY)
def boundary_gradient_halved() -> Patch:
    """Halves the gradient that crosses one boundary, as if it were averaged over two senders."""
    return _gradients_taken(lambda i, gradients: tuple(g * 0.5 for g in gradients) if i.cell == 1 else gradients)


def _auxiliary_losses(change: Callable[[list[Tensor]], list[Tensor]]) -> Patch:
    """Changes what is sent back from the auxiliary losses of cell 1."""

    def replace(step: _TrainingStep, i: Instruction) -> None:
        graph = step.buffers.graphs[i.cell, i.micro_batch]
        if i.cell == 1:
            step.buffers.graphs[i.cell, i.micro_batch] = Graph(graph.outputs, change(graph.losses))

    return around_backward(replace)


@fault(r"judge", "zero.*auxiliary loss")
def auxiliary_loss_forgotten() -> Patch:
    """Reports the auxiliary loss of cell 1, and sends nothing back from it."""
    return _auxiliary_losses(lambda losses: [])


@fault(r"judge", "divided by M = 4.*auxiliary loss")
def auxiliary_loss_scaled_otherwise() -> Patch:
    """Divides the auxiliary loss of cell 1 by M."""
    return _auxiliary_losses(lambda losses: [loss / M for loss in losses])


# -- over replicas -----------------------------------------------------------------------------------------------------


@fault("replica 1", "left out", replicas=2)
def replica_left_out() -> Patch:
    """Adds nothing of replica 1 to the gradients."""

    def forget(reduce: Any, parameters: Any, group: Any) -> None:
        if group.rank() == 1:
            for parameter in parameters:
                parameter.grad.zero_()
        reduce(parameters, group)

    return replaced(weight_update, "reduce_over_replicas", forget)


@fault("replica 1", "left out", replicas=2)
def replicas_not_added_up() -> Patch:
    """Leaves every replica with its own gradients."""
    return replaced(weight_update, "reduce_over_replicas", lambda reduce, parameters, group: None)


@fault("head.*replica 1|replica 1.*head", "left out", replicas=2)
def last_bucket_lost() -> Patch:
    """Leaves the last bucket of gradients out of the sum over replicas."""

    def buckets(make: Any, gradients_of_all: Any) -> Any:
        return [[gradient] for gradient in gradients_of_all][:-1]

    return replaced(gradients, "buckets", buckets)
