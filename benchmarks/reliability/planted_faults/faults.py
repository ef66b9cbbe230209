"""Plants faults in the engine and the trainer, one at a time: what goes wrong, and what gpipe-verify must say of it.

A fault is a function that replaces one function of gpipe_cli in a worker. Beside it stand the quantities that must
differ in gpipe-verify's report, and words that its findings must contain. `tests/verify/test_planted_faults.py` tries
them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from struct import pack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_cli.checkpoint.lr_schedule_state import LRScheduleState
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
Plant = Callable[[], Patch]

ALWAYS = ("pipeline.remat=always",)
AVERAGE = ("trainer.average=0.9",)
BF16 = ("precision=bf16", "precision.boundaries=bfloat16", "model.batchnorm=false")
FP16 = ("precision=fp16", "model.batchnorm=false")
NO_AUXILIARY = ("model.auxiliary=false", "pipeline.partition=[2,1,2,1]")  # nothing but the boundary reaches layer norm
TIED = ("model.tied=declared", "model.batchnorm=false")
UNEVEN = ("data.batch_size=14",)
WARM_UP = ("lr_schedule.warmup_steps=20",)


@dataclass(frozen=True)
class Fault:
    """Describes a planted fault.

    Attributes:
        name: of the function that plants it.
        plant: plants it while its context lasts.
        differs: names of the quantities that must differ.
        said: regular expression that the findings must contain.
        words: of the command line, beside those of the subject.
    """

    name: str
    plant: Plant
    differs: Sequence[str]
    said: str
    words: Sequence[str]


FAULTS: dict[str, Fault] = {}


def fault(*differs: str, said: str = "", words: Sequence[str] = ()) -> Callable[[Plant], Plant]:
    """Registers the decorated function as a fault; its docstring says what goes wrong."""

    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = Fault(plant.__name__, plant, differs, said, words)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plants a fault inside the context; "" plants none."""
    with FAULTS[name].plant() if name else ExitStack():
        yield


def replaced(owner: object, name: str, change: Callable[..., Any]) -> Patch:
    """Replaces a function of a module or class by ``change(function, *arguments)``."""
    function = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *a, **k: change(function, *a, **k))


def run_training(change: Callable[..., Any]) -> Patch:
    """Replaces a cell's run by ``change(run, cell, inputs, targets, step, micro_batch, signature, first_time)``."""
    return replaced(Cell, "run_training", change)


def handler_replaced(op: Op, change: Callable[..., None]) -> Patch:
    """Replaces what a training step does for an operation by ``change(handler, step, instruction)``."""
    handlers = _TrainingStep.HANDLERS
    return mock.patch.dict(handlers, {op: partial(change, handlers[op])})


# -- how a run begins and goes on --------------------------------------------------------------------------------------


@fault(c.BEGIN, said=r"layer mix_3 \(cell 2\).*must draw weights from torch's generator")
def other_weights_in_one_layer() -> Patch:
    """Draws the weights of one layer by another seed."""
    return replaced(built_cells, "build_layer", lambda make, b, i, seed, device: make(b, i, seed + (i == 5), device))


@fault(c.RESUMED, said=r"layer mix_3 \(cell 2\)")
def resumed_with_another_layer() -> Patch:
    """Restores a layer from the file of another one of the same shape."""

    def load(function: Any, info: Any, name: str) -> Any:
        return function(info, "mix_2" if name == "mix_3" else name)

    return replaced(weight_update, "load_layer", load)


@fault(c.RATES, said="step 5", words=WARM_UP)
def resumed_with_the_first_rate() -> Patch:
    """Begins the learning rate schedule anew in a resumed run."""
    return replaced(LRScheduleState, "restore", lambda function, state, saved: None)


@fault(c.SKIPPED, said=r"layer norm \(cell 1\).*norm\.norm")
def averages_updated_by_a_skipped_step() -> Patch:
    """Updates BatchNorm's moving averages in a step that is not finite, too."""

    def update(function: Any, updater: Updater, report: StepReport, *rest: Any) -> None:
        if not report.finite:
            finish_batchnorm(updater._batchnorms, None)
        function(updater, report, *rest)

    return replaced(Updater, "update", update)


@fault(c.OUTPUTS, said=r"layer embed \(cell 0\).*the data source must give the same")
def mini_batch_skipped() -> Patch:
    """Trains on the second mini-batch first."""

    def skip(read: Any, source: Any, position: Any, *rest: Any) -> Any:
        found = read(source, position, *rest)
        next(found)
        return found

    return replaced(batches, "training_batches", skip)


# -- forward and recompute ---------------------------------------------------------------------------------------------


@fault(c.SEEDS, said=r"step 2.*layer mix_0 \(cell 0\)")
def noise_ignores_the_step() -> Patch:
    """Draws the same masks in every step."""

    def forget(form: str, *numbers: int) -> bytes:
        seed_of = form == "<6q"  # kind, seed, step, replica, micro-batch, layer
        return pack(form, *(0 if seed_of and place == 2 else number for place, number in enumerate(numbers)))

    return mock.patch.object(randomness, "pack", forget)


@fault(c.MODES, said=r"layer mix_2 \(cell 2\).*in evaluation mode")
def cell_in_evaluation_mode() -> Patch:
    """Trains cell 2 in evaluation mode, without dropout."""

    def evaluating(run: Any, cell: Cell, *arguments: Any) -> Any:
        if cell.number == 2:
            cell.train(False)
        return run(cell, *arguments)

    return run_training(evaluating)


@fault(c.GIVEN_AGAIN, c.AGAIN, said=r"inputs in recompute.*layer mix_2 \(cell 2\)")
def another_input_recomputed() -> Patch:
    """Recomputes cell 2 for micro-batch 2 from the activations of micro-batch 1."""

    def stale(run: Any, step: _TrainingStep, i: Instruction) -> None:
        if (i.cell, i.micro_batch) == (2, 2):
            of_both = zip(step.buffers.inputs[2, 1], step.buffers.inputs[2, 2], strict=True)
            step.buffers.inputs[2, 2] = tuple(
                other.detach().requires_grad_(own.requires_grad) for other, own in of_both
            )
        run(step, i)

    return handler_replaced(Op.RECOMPUTE, stale)


@fault(c.AGAIN, said=r"layer norm \(cell 1\).*its BatchNorm normalises by other statistics")
def recompute_by_moving_averages() -> Patch:
    """Normalises by the moving averages when a micro-batch is recomputed."""

    def normalise(forward: Any, norm: DeferredBatchNorm, x: Tensor) -> Tensor:
        if norm.gathering or not norm.training:
            return forward(norm, x)  # type: ignore[no-any-return]
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)

    return replaced(DeferredBatchNorm, "forward", normalise)


# -- the loss ----------------------------------------------------------------------------------------------------------


@fault(c.LOSS)
def padding_counted() -> Patch:
    """Divides by the number of all tokens, padding among them."""

    def count(write: Any, codec: BatchPlanCodec, exchange: Any, micro_batches: Any, weights: Any) -> None:
        write(codec, exchange, micro_batches, [float(targets[0].numel()) for _, targets in micro_batches])

    return replaced(BatchPlanCodec, "write", count)


@fault(c.LOSSES, c.STATISTICS, said="the outputs of all layers agree.*other targets")
def targets_of_another_micro_batch() -> Patch:
    """Scores every micro-batch against the targets of the next."""

    def score(function: Any, step: _TrainingStep, outputs: Any, micro_batch: int) -> Tensor:
        return function(step, outputs, (micro_batch + 1) % 4)  # type: ignore[no-any-return]

    return replaced(_TrainingStep, "_score", score)


# -- gradients ---------------------------------------------------------------------------------------------------------


@fault(c.PASSED_BACK, c.GRADIENTS, said=r"layer norm \(cell 1\)", words=NO_AUXILIARY)
def boundary_gradient_halved() -> Patch:
    """Halves the gradient that crosses one boundary, as if it were averaged over two senders."""

    def halve(take: Any, step: _TrainingStep, i: Instruction) -> tuple[Tensor, ...]:
        return tuple(gradient * (0.5 if i.cell == 1 else 1.0) for gradient in take(step, i))

    return replaced(_TrainingStep, "_take_output_gradients", halve)


@fault(c.GRADIENTS, said=r"layer mix_3 \(cell 2\)", words=("pipeline.schedule=zero_bubble",))
def weight_half_lost() -> Patch:
    """Loses the second half of one backward of cell 2."""

    def lose(run: Any, step: _TrainingStep, i: Instruction) -> None:
        if (i.cell, i.micro_batch) == (2, 1):
            step.buffers.weight_halves.pop((2, 1))
        else:
            run(step, i)

    return handler_replaced(Op.WEIGHT_GRADIENT, lose)


@fault(c.GRADIENTS, said=r"layer embed \(cell 0\)", words=TIED)
def tied_gradient_lost() -> Patch:
    """Leaves out the gradient of one use of a tied parameter."""

    def lose(function: Any, ties: TiedParameters, owner: Use, use: Use) -> Tensor | None:
        return None if use.name.startswith("head") else function(ties, owner, use)

    return replaced(TiedParameters, "_brought_to", lose)


@fault(c.GRADIENTS, c.REPLICAS, words=("pipeline.workers=1", "pipeline.replicas=2"))
def replicas_not_added_up() -> Patch:
    """Leaves every replica with its own gradients."""
    return replaced(weight_update, "reduce_over_replicas", lambda reduce, parameters, group: None)


@fault(c.NORM)
def norm_of_one_cell() -> Patch:
    """Takes the norm of the last cell's gradients for that of all."""

    def write(function: Any, reporter: StepReporter, exchange: Any, numbers: Any, squares: Tensor) -> None:
        only = squares.clone()
        only[:-2] = 0  # all but the head's weight and bias
        function(reporter, exchange, numbers, only)

    return replaced(StepReporter, "write_norms", write)


# -- the update --------------------------------------------------------------------------------------------------------


@fault(c.CLIPPED, said=r"layer norm \(cell 1\)")
def clipping_forgotten_in_a_cell() -> Patch:
    """Clips all cells but cell 1."""

    def scale(function: Any, every: list[nn.Parameter], factor: float) -> None:
        function([*every[:3], *every[7:]], factor)  # without norm.weight, norm.bias and the judge's

    return replaced(weight_update, "scale_gradients", scale)


@fault(c.STATE, said="exp_avg")
def momentum_of_another_optimizer() -> Patch:
    """Makes the trainer's optimizer with a beta of 0.8 instead of 0.9."""

    def other(make: Any, section: Any, *others: Any) -> Any:
        return make({**section, "betas": [0.8, 0.98]}, *others)

    return replaced(training_assembly, "build_optimizer", other)


@fault(c.UPDATED, said=r"layer judge \(cell 1\)", words=(*TIED, "pipeline.workers=4"))
def tied_value_not_sent() -> Patch:
    """Gives the uses on other workers the owner's value before the first step only."""

    def update(function: Any, updater: Updater, *rest: Any) -> None:
        with replaced(TiedParameters, "spread", lambda spread, ties: None):
            function(updater, *rest)

    return replaced(Updater, "update", update)


@fault(c.BUFFERS, said=r"layer norm \(cell 1\)", words=UNEVEN)
def mean_of_unequal_means() -> Patch:
    """Gives micro-batches of different sizes the same weight in BatchNorm's averages."""

    def alike(gather: Any, norm: DeferredBatchNorm, count: int, mean: Tensor, variance: Tensor) -> None:
        gather(norm, 1, mean, variance)

    return replaced(DeferredBatchNorm, "_gather", alike)


@fault(c.AVERAGES, said="weights are right, their averages", words=AVERAGE)
def average_follows_too_slowly() -> Patch:
    """Counts ten updates more in the decay of the average."""
    return replaced(WeightAverage, "update", lambda function, average, t: function(average, t + 10))


# -- an evaluation -----------------------------------------------------------------------------------------------------


@fault(c.EVALUATED, c.METRICS, said=r"layer mix_2 \(cell 2\)")
def one_cell_evaluated_in_training_mode() -> Patch:
    """Leaves dropout of cell 2 on during an evaluation."""

    def train(function: Any, cell: Cell, training: bool) -> None:
        function(cell, training or cell.number == 2)

    return replaced(Cell, "train", train)


@fault(c.EVALUATED, said=r"layer embed \(cell 0\)", words=AVERAGE)
def weights_evaluated_in_place_of_averages() -> Patch:
    """Evaluates the weights where their averages are asked for."""
    return replaced(Updater, "averaged_weights", lambda function, updater: nullcontext())


@fault(c.KEPT, said=r"layer embed \(cell 0\)", words=AVERAGE)
def averages_stay_after_an_evaluation() -> Patch:
    """Leaves the averages in the layers when an evaluation ends."""

    @contextmanager
    def exchange(average: WeightAverage) -> Iterator[None]:
        average._exchange()
        yield

    return replaced(WeightAverage, "in_place_of_weights", lambda function, average: exchange(average))


# -- half precision ----------------------------------------------------------------------------------------------------


@fault(c.GRADIENTS, said=r"layer head \(cell 3\)", words=FP16)
def loss_scale_not_divided_out() -> Patch:
    """Leaves the loss scale in the gradients."""
    return replaced(Updater, "reduce_gradients", lambda reduce, updater, scale: reduce(updater))


@fault(c.GRADIENTS, said=r"layer mix_2 \(cell 2\)", words=FP16)
def loss_scale_left_in_one_layer() -> Patch:
    """Divides the loss scale out of the gradients of all layers but one."""

    def all_but_one(scale: Any, parameters: list[nn.Parameter], factor: float) -> None:
        scale(parameters if factor != 1 / 65536 else [*parameters[:7], *parameters[9:]], factor)

    return replaced(weight_update, "scale_gradients", all_but_one)


@fault(c.USED, said=r"layer mix_0 \(cell 0\)", words=BF16)
def stale_weight_casts() -> Patch:
    """Keeps the casts of weights from one step to the next."""
    return replaced(WeightCasts, "forget", lambda forget, casts: None)


@fault(c.GRADIENTS, said=r"layer head \(cell 3\)", words=BF16)
def weight_casts_without_a_graph() -> Patch:
    """Casts weights without a graph, so that nothing flows back to them."""

    held = property(lambda casts: [cast.detach() for cast in casts._casts or ()])
    return mock.patch.object(WeightCasts, "held", held)


@fault(c.OUTPUTS, said=r"layer mix_0 \(cell 0\).*it depends on something", words=BF16)
def boundary_cast_left_out() -> Patch:
    """Leaves what passes between the layers of cell 0 as they return it, in float32."""

    def as_it_is(run: Any, cell: Cell, *arguments: Any) -> Any:
        left_out = mock.patch.object(cells, "passed_on", lambda outputs, inputs, dtype: outputs)
        with left_out if cell.number == 0 else nullcontext():
            return run(cell, *arguments)

    return run_training(as_it_is)


@fault(
    c.GRADIENTS,
    said=r"layer head \(cell 3\)",
    words=("precision=fp16", "precision.loss_scale=1073741824", "model.batchnorm=false"),
)
def overflow_ignored() -> Patch:
    """Takes gradients that overflow float16 for its largest number."""

    def finite(reduce: Any, updater: Updater, scale: float) -> None:
        reduce(updater, scale)
        for parameter in updater._parameters:
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad)

    return replaced(Updater, "reduce_gradients", finite)
