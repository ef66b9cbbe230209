"""Plants faults in the update: weights, optimizer, clipping, learning rate, averages, skipped steps, late drift."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.factory import build
from gpipe_cli.metrics.step_report import StepReport
from gpipe_cli.optim import lr_schedules
from gpipe_cli.optim.average import WeightAverage
from gpipe_cli.pipeline import gradients
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.trainer import update as weight_update
from gpipe_cli.trainer.loop import Trainer
from gpipe_cli.trainer.update import Updater

from .fault import after_update, before_update, fault, parameters, replaced, run_training, several

Patch = AbstractContextManager[Any]
Before = dict[nn.Parameter, Tensor]
WARM_UP = "lr_schedule.warmup_steps=20"
ADAMW = ("optimizer=adamw", "optimizer.weight_decay=0.3")
SGD = ("optimizer=sgd", "optimizer.momentum=0")

# -- weights -----------------------------------------------------------------------------------------------------------


def _old_weights(only_again: bool) -> Patch:
    """Runs cell 2 with the weights that it had before the last update."""
    kept: dict[int, list[Tensor]] = {}

    def change(run: Any, cell: Cell, x: Any, y: Any, step: int, m: int, s: Any, first: bool) -> Any:
        if cell.number != 2:
            return run(cell, x, y, step, m, s, first)
        own = [parameter for _, parameter in cell.parameters()]
        if step not in kept:
            kept[step] = [parameter.detach().clone() for parameter in own]
        if step - 1 not in kept or (first and only_again):
            return run(cell, x, y, step, m, s, first)
        now = [parameter.data for parameter in own]
        for parameter, old in zip(own, kept[step - 1], strict=True):
            parameter.data = old
        try:
            return run(cell, x, y, step, m, s, first)
        finally:
            for parameter, new in zip(own, now, strict=True):
                parameter.data = new

    return run_training(change)


@fault(r"cell 2", "stale weights in forward")
def stale_weights() -> Patch:
    """Runs cell 2 with the weights of the step before."""
    return _old_weights(only_again=False)


@fault(r"cell 2", "stale weights in recompute", "pipeline.remat=always")
def stale_weights_in_recompute() -> Patch:
    """Recomputes cell 2 with the weights of the step before."""
    return _old_weights(only_again=True)


@fault(r"layer norm.*cell 1", "not updated")
def cell_not_updated() -> Patch:
    """Leaves cell 1 without an update."""

    def lose(trainer: Trainer, report: StepReport) -> None:
        for parameter in parameters(trainer, 1):
            parameter.grad = None

    return before_update(lose)


def _moved_further(cell: int, share: float, when: Callable[[Trainer], bool] = lambda trainer: True) -> Patch:
    """Moves the weights of a cell on by a share of their update."""

    def move(trainer: Trainer, before: Before) -> None:
        for parameter in parameters(trainer, cell) if when(trainer) else []:
            parameter.data += share * (parameter.data - before[parameter])

    return after_update(move)


@fault(r"cell 1", "2 times|twice")
def cell_updated_twice() -> Patch:
    """Applies the update of cell 1 twice."""
    return _moved_further(1, 1.0)


@fault(r"cell 2", "rounded|precision")
def weights_rounded() -> Patch:
    """Rounds the weights of cell 2 to bfloat16 after every update."""

    def narrow(trainer: Trainer, before: Before) -> None:
        for parameter in parameters(trainer, 2):
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)

    return after_update(narrow)


@fault(r"step 5\d: .*cell 1", "0.001|moved", "verify.later=55")
def drift_after_fifty_steps() -> Patch:
    """Lets the weights of cell 1 drift from step 50 on, by a thousandth of an update each."""
    return _moved_further(1, 1e-3, lambda trainer: trainer.progress.step >= 50)


@fault(r"layer mix_0 \(cell 0\)", "frozen", "model.frozen=true", *ADAMW)
def frozen_layer_decays() -> Patch:
    """Gives frozen parameters a gradient of zero, so that weight decay shrinks them."""

    def fill(function: Any, every: list[nn.Parameter]) -> None:
        function(every)
        for parameter in every:
            if parameter.grad is None:
                parameter.requires_grad_()
                parameter.grad = torch.zeros_like(parameter)
                parameter.requires_grad_(False)

    return replaced(weight_update, "fill_gradients", fill)


# -- optimizer ---------------------------------------------------------------------------------------------------------


@fault(r"layer head \(cell 3\)", "lost")
def optimizer_state_lost() -> Patch:
    """Deletes the optimizer's state of cell 3 before the second update."""

    def forget(trainer: Trainer, report: StepReport) -> None:
        for parameter in parameters(trainer, 3):
            trainer.updater.optimizer.state.pop(parameter, None)

    return before_update(forget)


@fault(r"mix_2\.linear\.weight", "mix_3\\.linear\\.weight")
def momenta_exchanged() -> Patch:
    """Exchanges what the optimizer keeps of two parameters of the same shape before the second update."""

    def exchange(trainer: Trainer, report: StepReport) -> None:
        state, own = trainer.updater.optimizer.state, parameters(trainer, 2)
        if trainer.progress.step == 1:
            state[own[0]], state[own[2]] = state[own[2]], state[own[0]]

    return before_update(exchange)


@fault(r"cell 1", "weight decay", *ADAMW)
def decay_left_out_of_a_cell() -> Patch:
    """Leaves weight decay out of cell 1."""

    def undo(trainer: Trainer, report: StepReport) -> None:
        group = trainer.updater.optimizer.param_groups[0]
        for parameter in parameters(trainer, 1):
            parameter.data /= 1 - group["lr"] * group["weight_decay"]

    return before_update(undo)


@fault(r"norm|bias", "weight decay|decay_only", "optimizer.decay_only=matrices", *ADAMW)
def decay_of_biases() -> Patch:
    """Decays biases and norms although optimizer.decay_only=matrices leaves them out, on both sides."""
    return replaced(build, "_groups", lambda groups, section, every: every)


@fault("betas|beta|exp_avg", ".")
def momentum_of_another_optimizer() -> Patch:
    """Makes the trainer's optimizer with a beta of 0.8 instead of 0.9."""

    def other(make: Any, section: Any, *others: Any) -> Any:
        return make({**section, "betas": [0.8, 0.98]}, *others)

    from gpipe_cli.trainer import training

    return replaced(training, "build_optimizer", other)


# -- clipping ----------------------------------------------------------------------------------------------------------


@fault("every cell", "not clipped", *SGD)
def clipping_forgotten() -> Patch:
    """Applies the gradients as they are."""
    return replaced(weight_update, "scale_gradients", lambda function, every, factor: None)


@fault("every cell", "not clipped")
def clipping_forgotten_with_adam() -> Patch:
    """Applies the gradients as they are."""
    return clipping_forgotten()


@fault("in cell 0.*in cell 3", "norm of its own gradients", *SGD)
def clipping_by_cell() -> Patch:
    """Clips each cell by the norm of its own gradients."""

    def scale(trainer: Trainer, report: StepReport) -> None:
        for cell in trainer.runtime.engine.cells:
            own = parameters(trainer, cell)
            norm, limit = math.sqrt(float(gradients.squared_norms(own).sum())), trainer.settings.trainer.gradient_clip
            gradients.scale_gradients(own, min(1.0, (limit or math.inf) / norm) if norm else 1.0)

    return several(before_update(scale), replaced(weight_update, "scale_gradients", lambda function, every, f: None))


@fault("in cell 0.*in cell 3", "norm of its own gradients")
def clipping_by_cell_with_adam() -> Patch:
    """Clips each cell by the norm of its own gradients."""
    return clipping_by_cell()


@fault("cell 1", "clip", *SGD)
def clipping_forgotten_in_a_cell() -> Patch:
    """Clips all cells but cell 1."""

    def scale(function: Any, every: list[nn.Parameter], factor: float) -> None:
        function([*every[:3], *every[7:]], factor)  # without norm.weight, norm.bias and the judge's

    return replaced(weight_update, "scale_gradients", scale)


# -- learning rate -----------------------------------------------------------------------------------------------------


@fault("every cell", "learning rate", WARM_UP)
def warm_up_off_by_one() -> Patch:
    """Begins the warm-up at 0 instead of 1 / warmup_steps, on both sides."""

    def shifted(make: Any, warmup_steps: int, after: Any) -> Any:
        factor = make(warmup_steps, after)
        return lambda t: factor(t) - (1 / warmup_steps if t < warmup_steps else 0.0)

    return replaced(lr_schedules, "_with_warmup", shifted)


def _rate_kept(when: Callable[[StepReport], bool]) -> Patch:
    """Does not move the learning rate on in some steps."""

    def update(function: Any, updater: Updater, report: StepReport, *rest: Any) -> None:
        rates = [group["lr"] for group in updater.optimizer.param_groups]
        function(updater, report, *rest)
        for group, rate in zip(updater.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate if when(report) else group["lr"]

    return replaced(Updater, "update", update)


@fault("every cell", "learning rate.*that of step 1", WARM_UP)
def lr_schedule_stands_still() -> Patch:
    """Keeps the learning rate of the first step."""
    return _rate_kept(lambda report: True)


@fault("every cell", "learning rate.*that of step 5", WARM_UP)
def lr_schedule_moves_with_micro_batches() -> Patch:
    """Moves the learning rate on for every micro-batch."""

    def update(function: Any, updater: Updater, *rest: Any) -> None:
        function(updater, *rest)
        for _ in range(3):
            updater._lr_schedule.step()

    return replaced(Updater, "update", update)


@fault("cell 2", "learning rate|10 times", WARM_UP, *SGD)
def cell_with_another_rate() -> Patch:
    """Updates cell 2 with ten times the learning rate."""
    return _moved_further(2, 9.0)


# -- skipped steps -----------------------------------------------------------------------------------------------------


@fault("exp_avg|optimizer", "skipped|not finite")
def skipped_step_moves_momenta() -> Patch:
    """Moves the momenta on in a step that is skipped."""

    def move(trainer: Trainer, report: StepReport) -> None:
        if not report.finite:
            for state in trainer.updater.optimizer.state.values():
                state["exp_avg"] *= 0.9

    return before_update(move)


@fault("every cell", "learning rate.*that of step", WARM_UP)
def skipped_step_keeps_the_rate() -> Patch:
    """Does not move the learning rate on in a step that is skipped."""
    return _rate_kept(lambda report: not report.finite)


@fault("average", "skipped", "trainer.average=0.9")
def skipped_step_counts_for_the_average() -> Patch:
    """Averages the weights in after a step that is skipped, too."""

    def update(function: Any, updater: Updater, report: StepReport, updates_before: int) -> None:
        function(updater, report, updates_before)
        if not report.finite and updater._average is not None:
            updater._average.update(updates_before)

    return replaced(Updater, "update", update)


# -- averages ----------------------------------------------------------------------------------------------------------

AVERAGE = "trainer.average=0.9"


@fault("average", "before the update|before the step|step before", AVERAGE)
def averaged_before_the_update() -> Patch:
    """Averages the weights in before they are updated."""

    def early(trainer: Trainer, report: StepReport) -> None:
        if trainer.updater._average is not None and report.finite:
            _UPDATE(trainer.updater._average, trainer.progress.step - trainer.progress.skipped)

    return several(before_update(early), replaced(WeightAverage, "update", lambda function, average, t: None))


_UPDATE = WeightAverage.update


@fault("average", "decay|number of updates", AVERAGE)
def average_follows_too_slowly() -> Patch:
    """Counts ten updates more in the decay of the average."""
    return replaced(WeightAverage, "update", lambda function, average, t: function(average, t + 10))


@fault("average", "layer|cell", AVERAGE)
def average_of_a_cell_forgotten() -> Patch:
    """Averages only the first three tensors of the worker."""

    def few(function: Any, average: WeightAverage, t: int) -> None:
        live, averages = average._live, average._averages
        average._live, average._averages = live[:3], averages[:3]
        function(average, t)
        average._live, average._averages = live, averages

    return replaced(WeightAverage, "update", few)


# -- replicas ----------------------------------------------------------------------------------------------------------


@fault(r"replica 1.*layer mix_2 \(cell 2\)", "ended the step with other values", replicas=2)
def replica_drifts() -> Patch:
    """Updates the weights of replica 1 a little further."""
    return _moved_further(2, 0.01, lambda trainer: trainer.runtime.world.replica == 1)


@fault("replica 1.*layer embed", "ended the step with other values.*exp_avg", replicas=2)
def replica_loses_momenta() -> Patch:
    """Clears the momenta of replica 1 after the last step."""

    def clear(trainer: Trainer, before: Before) -> None:
        if trainer.runtime.world.replica == 1:
            for state in trainer.updater.optimizer.state.values():
                state["exp_avg"].zero_()

    return after_update(clear)
