"""Plants faults in the engine and the trainer, one at a time: what goes wrong, and what gpipe-verify must say of it.

A fault is a function that takes the place of one of gpipe_cli in a worker, and gets that one as its first argument.
Beside it stand the quantities that must differ in gpipe-verify's report, and words that its findings must contain.
`tests/verify/test_planted_faults.py` tries them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_cli.distributed import cells as built_cells
from gpipe_cli.distributed.batch_plan import BatchPlanCodec
from gpipe_cli.metrics.step_report import StepReport, StepReporter
from gpipe_cli.optim.average import WeightAverage
from gpipe_cli.pipeline import cell as cells
from gpipe_cli.pipeline import randomness
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm, finish_batchnorm
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.engine import _TrainingStep
from gpipe_cli.pipeline.tied_parameters import TiedParameters, Use
from gpipe_cli.pipeline.weight_casts import WeightCasts
from gpipe_cli.schedule.instruction import Instruction, Op
from gpipe_cli.trainer import batches, training_assembly
from gpipe_cli.trainer import update as weight_update
from gpipe_cli.trainer.update import Updater
from gpipe_cli.verify import compare as c

Patch = AbstractContextManager[Any]
Change = Callable[..., Any]  # what stands in a function's place; its first argument is that function
Place = Callable[[Change], Patch]

AVERAGE = ("trainer.average=0.9",)
BF16 = ("precision=bf16", "precision.boundaries=bfloat16", "model.batchnorm=false")
FP16 = ("precision=fp16", "model.batchnorm=false")
NO_AUXILIARY = ("model.auxiliary=false", "pipeline.partition=[2,1,2,1]")  # nothing but the boundary reaches layer norm
OVERFLOWING = ("precision=fp16", "precision.loss_scale=1073741824", "model.batchnorm=false")
TIED = ("model.tied=declared", "model.batchnorm=false")
UNEVEN = ("data.batch_size=14",)
WARM_UP = ("lr_schedule.warmup_steps=20",)


@dataclass(frozen=True)
class Fault:
    """Describes a planted fault.

    Attributes:
        plant: plants it while its context lasts.
        differs: names of the quantities that must differ.
        said: regular expression that the findings must contain.
        words: of the command line, beside those of the subject.
    """

    plant: Callable[[], Patch]
    differs: Sequence[str]
    said: str
    words: Sequence[str]


FAULTS: dict[str, Fault] = {}


def fault(place: Place, *differs: str, said: str = "", words: Sequence[str] = ()) -> Callable[[Change], Change]:
    """Registers the decorated function as a fault that is planted in ``place``; its docstring says what goes wrong."""

    def register(change: Change) -> Change:
        FAULTS[change.__name__] = Fault(partial(place, change), differs, said, words)
        return change

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plants a fault inside the context; "" plants none."""
    with FAULTS[name].plant() if name else nullcontext():
        yield


def function(owner: object, name: str) -> Place:
    """Returns a function of a module or class as the place of a fault."""

    def replaced(change: Change) -> Patch:
        usual = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *a, **k: change(usual, *a, **k))

    return replaced


def handler(op: Op) -> Place:
    """Returns what a training step does for an operation as the place of a fault."""
    handlers = _TrainingStep.HANDLERS
    return lambda change: mock.patch.dict(handlers, {op: partial(change, handlers[op])})


# -- how a run begins and goes on --------------------------------------------------------------------------------------


@fault(
    function(built_cells, "build_layer"),
    c.BEGIN,
    said=r"layer mix_3 \(cell 2\).*must draw weights from torch's generator",
)
def other_weights_in_one_layer(make: Any, builder: Any, index: int, seed: int, device: torch.device) -> Any:
    """Draws the weights of one layer by another seed."""
    return make(builder, index, seed + (index == 5), device)


@fault(function(weight_update, "load_layer"), c.RESUMED, said=r"layer mix_3 \(cell 2\)")
def resumed_with_another_layer(load: Any, info: Any, name: str) -> Any:
    """Restores a layer from the file of another one of the same shape."""
    return load(info, "mix_2" if name == "mix_3" else name)


@fault(function(Updater, "restore_lr"), c.RATES, said="step 5", words=WARM_UP)
def resumed_with_the_first_rate(restore: Any, updater: Updater, info: Any, settings: Any) -> None:
    """Begins the learning rate schedule anew in a resumed run."""


@fault(function(Updater, "update"), c.SKIPPED, said=r"layer norm \(cell 1\).*norm\.norm")
def averages_updated_by_a_skipped_step(update: Any, updater: Updater, report: StepReport, *rest: Any) -> None:
    """Updates BatchNorm's moving averages in a step that is not finite, too."""
    if not report.finite:
        finish_batchnorm(updater._batchnorms, None)
    update(updater, report, *rest)


@fault(
    function(batches, "training_batches"),
    c.OUTPUTS,
    said=r"layer embed \(cell 0\).*the data source must give the same",
)
def mini_batch_skipped(read: Any, source: Any, position: Any, *rest: Any) -> Any:
    """Trains on the second mini-batch first."""
    found = read(source, position, *rest)
    next(found)
    return found


# -- forward and recompute ---------------------------------------------------------------------------------------------


@fault(function(randomness, "pack"), c.OUTPUTS, said=r"step 2.*layer mix_0 \(cell 0\)")
def noise_ignores_the_step(pack: Any, form: str, *numbers: int) -> Any:
    """Draws the same masks in every step."""
    seed_of = form == "<6q"  # kind, seed, step, replica, micro-batch, layer
    return pack(form, *(0 if seed_of and place == 2 else number for place, number in enumerate(numbers)))


@fault(function(Cell, "run_training"), c.OUTPUTS, said=r"layer mix_2 \(cell 2\)")
def cell_in_evaluation_mode(run: Any, cell: Cell, *arguments: Any) -> Any:
    """Trains cell 2 in evaluation mode, without dropout."""
    if cell.number == 2:
        cell.train(False)
    return run(cell, *arguments)


@fault(handler(Op.RECOMPUTE), c.AGAIN, said=r"outputs recomputed.*layer mix_2 \(cell 2\)")
def another_input_recomputed(run: Any, step: _TrainingStep, i: Instruction) -> None:
    """Recomputes cell 2 for micro-batch 2 from the activations of micro-batch 1."""
    if (i.cell, i.micro_batch) == (2, 2):
        of_both = zip(step.buffers.inputs[2, 1], step.buffers.inputs[2, 2], strict=True)
        step.buffers.inputs[2, 2] = tuple(other.detach().requires_grad_(own.requires_grad) for other, own in of_both)
    run(step, i)


@fault(
    function(DeferredBatchNorm, "forward"),
    c.AGAIN,
    said=r"layer norm \(cell 1\).*its BatchNorm normalises by other statistics",
)
def recompute_by_moving_averages(forward: Any, norm: DeferredBatchNorm, x: Tensor) -> Any:
    """Normalises by the moving averages when a micro-batch is recomputed."""
    if norm.gathering or not norm.training:
        return forward(norm, x)
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)


# -- the loss ----------------------------------------------------------------------------------------------------------


@fault(function(BatchPlanCodec, "write"), c.LOSS)
def padding_counted(write: Any, codec: BatchPlanCodec, exchange: Any, micro_batches: Any, weights: Any) -> None:
    """Divides by the number of all tokens, padding among them."""
    write(codec, exchange, micro_batches, [float(targets[0].numel()) for _, targets in micro_batches])


@fault(function(_TrainingStep, "_score"), c.LOSSES, said="the outputs of all layers agree.*other targets")
def targets_of_another_micro_batch(score: Any, step: _TrainingStep, outputs: Any, micro_batch: int) -> Any:
    """Scores every micro-batch against the targets of the next."""
    return score(step, outputs, (micro_batch + 1) % 4)


# -- gradients ---------------------------------------------------------------------------------------------------------


@fault(
    function(_TrainingStep, "_take_output_gradients"),
    c.GRADIENTS,
    said=r"layer norm \(cell 1\)",
    words=NO_AUXILIARY,
)
def boundary_gradient_halved(take: Any, step: _TrainingStep, i: Instruction) -> tuple[Tensor, ...]:
    """Halves the gradient that crosses one boundary, as if it were averaged over two senders."""
    return tuple(gradient * (0.5 if i.cell == 1 else 1.0) for gradient in take(step, i))


@fault(
    handler(Op.WEIGHT_GRADIENT),
    c.GRADIENTS,
    said=r"layer mix_3 \(cell 2\)",
    words=("pipeline.schedule=zero_bubble",),
)
def weight_half_lost(run: Any, step: _TrainingStep, i: Instruction) -> None:
    """Loses the second half of one backward of cell 2."""
    if (i.cell, i.micro_batch) == (2, 1):
        step.buffers.weight_halves.pop((2, 1))
    else:
        run(step, i)


@fault(function(TiedParameters, "_brought_to"), c.GRADIENTS, said=r"layer embed \(cell 0\)", words=TIED)
def tied_gradient_lost(brought_to: Any, ties: TiedParameters, owner: Use, use: Use) -> Any:
    """Leaves out the gradient of one use of a tied parameter."""
    return None if use.name.startswith("head") else brought_to(ties, owner, use)


@fault(
    function(weight_update, "reduce_over_replicas"),
    *(c.GRADIENTS, c.REPLICAS),
    words=("pipeline.workers=1", "pipeline.replicas=2"),
)
def replicas_not_added_up(reduce: Any, parameters: Any, group: Any) -> None:
    """Leaves every replica with its own gradients."""


@fault(function(StepReporter, "write_norms"), c.NORM)
def norm_of_one_cell(write: Any, reporter: StepReporter, exchange: Any, numbers: Any, squares: Tensor) -> None:
    """Takes the norm of the last cell's gradients for that of all."""
    only = squares.clone()
    only[:-2] = 0  # all but the head's weight and bias
    write(reporter, exchange, numbers, only)


# -- the update --------------------------------------------------------------------------------------------------------


@fault(function(weight_update, "scale_gradients"), c.CLIPPED, said=r"layer norm \(cell 1\)")
def clipping_forgotten_in_a_cell(scale: Any, every: list[nn.Parameter], factor: float) -> None:
    """Clips all cells but cell 1."""
    scale([*every[:3], *every[7:]], factor)  # without norm.weight, norm.bias and the judge's


@fault(function(training_assembly, "build_optimizer"), c.STATE, said="exp_avg")
def momentum_of_another_optimizer(make: Any, section: Any, *others: Any) -> Any:
    """Makes the trainer's optimizer with a beta of 0.8 instead of 0.9."""
    return make({**section, "betas": [0.8, 0.98]}, *others)


@fault(function(Updater, "update"), c.UPDATED, said=r"layer judge \(cell 1\)", words=(*TIED, "pipeline.workers=4"))
def tied_value_not_sent(update: Any, updater: Updater, *rest: Any) -> None:
    """Gives the uses on other workers the owner's value before the first step only."""
    with mock.patch.object(TiedParameters, "spread"):
        update(updater, *rest)


@fault(function(DeferredBatchNorm, "_gather"), c.BUFFERS, said=r"layer norm \(cell 1\)", words=UNEVEN)
def mean_of_unequal_means(gather: Any, norm: DeferredBatchNorm, count: int, mean: Tensor, variance: Tensor) -> None:
    """Gives micro-batches of different sizes the same weight in BatchNorm's averages."""
    gather(norm, 1, mean, variance)


@fault(function(WeightAverage, "update"), c.AVERAGES, said="weights are right, their averages", words=AVERAGE)
def average_follows_too_slowly(update: Any, average: WeightAverage, t: int) -> None:
    """Counts ten updates more in the decay of the average."""
    update(average, t + 10)


# -- an evaluation -----------------------------------------------------------------------------------------------------


@fault(function(Cell, "train"), c.EVALUATED, c.METRICS, said=r"layer mix_2 \(cell 2\)")
def one_cell_evaluated_in_training_mode(train: Any, cell: Cell, training: bool) -> None:
    """Leaves dropout of cell 2 on during an evaluation."""
    train(cell, training or cell.number == 2)


@fault(function(Updater, "averaged_weights"), c.EVALUATED, said=r"layer embed \(cell 0\)", words=AVERAGE)
def weights_evaluated_in_place_of_averages(averaged: Any, updater: Updater) -> Patch:
    """Evaluates the weights where their averages are asked for."""
    return nullcontext()


@fault(function(WeightAverage, "in_place_of_weights"), c.KEPT, said=r"layer embed \(cell 0\)", words=AVERAGE)
@contextmanager
def averages_stay_after_an_evaluation(exchanged: Any, average: WeightAverage) -> Iterator[None]:
    """Leaves the averages in the layers when an evaluation ends."""
    average._exchange()
    yield


# -- half precision ----------------------------------------------------------------------------------------------------


@fault(function(Updater, "reduce_gradients"), c.GRADIENTS, said=r"layer head \(cell 3\)", words=FP16)
def loss_scale_not_divided_out(reduce: Any, updater: Updater, scale: float) -> None:
    """Leaves the loss scale in the gradients."""
    reduce(updater)


@fault(function(weight_update, "scale_gradients"), c.GRADIENTS, said=r"layer mix_2 \(cell 2\)", words=FP16)
def loss_scale_left_in_one_layer(scale: Any, parameters: list[nn.Parameter], factor: float) -> None:
    """Divides the loss scale out of the gradients of all layers but one."""
    scale(parameters if factor != 1 / 65536 else [*parameters[:7], *parameters[9:]], factor)


@fault(function(WeightCasts, "forget"), c.USED, said=r"layer mix_0 \(cell 0\)", words=BF16)
def stale_weight_casts(forget: Any, casts: WeightCasts) -> None:
    """Keeps the casts of weights from one step to the next."""


@fault(
    lambda change: mock.patch.object(WeightCasts, "held", property(change)),
    c.GRADIENTS,
    said=r"layer head \(cell 3\)",
    words=BF16,
)
def weight_casts_without_a_graph(casts: WeightCasts) -> list[Tensor]:
    """Casts weights without a graph, so that nothing flows back to them."""
    return [cast.detach() for cast in casts._casts or ()]


@fault(function(Cell, "run_training"), c.OUTPUTS, said=r"layer mix_0 \(cell 0\).*it depends on something", words=BF16)
def boundary_cast_left_out(run: Any, cell: Cell, *arguments: Any) -> Any:
    """Leaves what passes between the layers of cell 0 as they return it, in float32."""
    left_out = mock.patch.object(cells, "passed_on", lambda outputs, inputs, dtype: outputs)
    with left_out if cell.number == 0 else nullcontext():
        return run(cell, *arguments)


@fault(function(Updater, "reduce_gradients"), c.GRADIENTS, said=r"layer head \(cell 3\)", words=OVERFLOWING)
def overflow_ignored(reduce: Any, updater: Updater, scale: float) -> None:
    """Takes gradients that overflow float16 for its largest number."""
    reduce(updater, scale)
    for parameter in updater._parameters:
        if parameter.grad is not None:
            torch.nan_to_num_(parameter.grad)
