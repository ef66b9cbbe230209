"""Plants faults in the engine and the trainer, one at a time, and names the words that gpipe-verify must find for each.

A fault is a function that takes the place of one of gpipe_cli in a worker, and gets that one as its first argument.
The small model shows every sort of fault in seconds.
"""

import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.subject import SUBJECT
from gpipe_cli.jobs.configuration import composed, prepare
from gpipe_cli.jobs.job import EntryPoint, launch_program
from gpipe_cli.launch.context import Context
from gpipe_cli.pipeline.batchnorm import finish_batchnorm
from gpipe_cli.pipeline.messages.boundary import grouped_like
from gpipe_cli.schedule.instruction import Op
from gpipe_cli.verify import compare as c
from gpipe_cli.verify import run as verify


def verified(run_dir: Path, *words: str, fault: str = "", subject: bool = True) -> dict[str, Any]:
    """Returns the report of gpipe-verify.

    Args:
        words: words of the command line; without pipeline.workers and pipeline.replicas all runs in this process.
        fault: name of the fault to plant; "" plants none.
        subject: on the model, data and task of this file.
    """
    typed = [*(SUBJECT if subject else ()), *words]
    apart = any(word.startswith(("pipeline.workers=", "pipeline.replicas=")) for word in typed)
    config = prepare(composed("verify", [*typed, *(() if apart else ("launch.inline=true",))])).config
    run_dir.mkdir(parents=True, exist_ok=True)
    job = {"settings": config, "started_at": time.monotonic(), "fault": fault}
    report = launch_program(EntryPoint(f"{__name__}:main", ("torch", __name__)), job, run_dir, lambda event: None)
    assert isinstance(report, dict)
    return report


def main(context: Context, config: dict[str, Any]) -> dict[str, Any] | None:
    """Verifies with the fault of ``config`` planted; the entry point of a worker."""
    with planted(config["fault"]):
        return verify.main(context, config)


# -- the faults --------------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """Describes a planted fault.

    Attributes:
        holder: module or class below gpipe_cli, or the table of a step's handlers.
        name: name of the function there, or of the operation.
        change: stands in its place; its first argument is the usual function.
        differs: names of the quantities that must differ.
        said: regular expression that the findings must contain.
        words: words of the command line, beside those of the subject.
    """

    holder: str
    name: str
    change: Callable[..., Any]
    differs: Sequence[str]
    said: str
    words: Sequence[str]


FAULTS: dict[str, Fault] = {}
STEP, UPDATER = "pipeline.engine:_TrainingStep", "trainer.update:Updater"
HANDLERS = f"{STEP}.HANDLERS"
OVERFLOWS = ("precision=fp16", f"precision.loss_scale={2.0**100}")
BF16 = ("precision=bf16", "precision.boundaries=bfloat16", "model.batchnorm=false")
NO_AUXILIARY = ("model.auxiliary=false", "pipeline.partition=[2,1,2,1]")  # nothing but the boundary reaches layer norm
REPLICAS = ("pipeline.workers=1", "pipeline.replicas=2")
TIED = ("model.tied=declared", "model.batchnorm=false")


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plants a fault inside the context; "" plants none."""
    if not name:
        yield
        return
    fault = FAULTS[name]
    holder: Any = pkgutil.resolve_name(f"gpipe_cli.{fault.holder}")
    if isinstance(holder, dict):
        op = Op[fault.name]
        patch: Any = mock.patch.dict(holder, {op: partial(fault.change, holder[op])})
    else:
        usual = getattr(holder, fault.name)
        change: Any = lambda *a, **k: fault.change(usual, *a, **k)  # noqa: E731  # a method needs a function
        patch = mock.patch.object(holder, fault.name, property(change) if isinstance(usual, property) else change)
    with patch:
        yield


def fault(holder: str, name: str, *differs: str, said: str = "", words: Sequence[str] = ()) -> Callable[..., Any]:
    """Registers the decorated function as a fault, which its docstring describes."""

    def register(change: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS[change.__name__] = Fault(holder, name, change, differs, said, words)
        return change

    return register


@fault(UPDATER, "update", c.BUFFERS, said="norm\\.norm", words=OVERFLOWS)
def averages_updated_by_a_skipped_step(update: Any, updater: Any, report: Any, *rest: Any) -> None:
    """Updates BatchNorm's moving averages in a step that is not finite, too."""
    if not report.finite:
        finish_batchnorm(updater._batchnorms, None)
    update(updater, report, *rest)


@fault("trainer.batches", "training_batches", c.OUTPUTS, said="layer embed.*the data source must give the same")
def mini_batch_skipped(read: Any, *arguments: Any) -> Any:
    """Trains on the second mini-batch first."""
    found = read(*arguments)
    next(found)
    return found


@fault(HANDLERS, "RECOMPUTE", c.AGAIN, said=r"outputs recomputed.*layer mix_2 \(cell 2\)")
def another_input_recomputed(run: Any, step: Any, i: Any) -> None:
    """Recomputes cell 2 for micro-batch 2 from the activations of micro-batch 1."""
    if (i.cell, i.micro_batch) == (2, 2):
        of_both = zip(step.buffers.inputs[2, 1], step.buffers.inputs[2, 2], strict=True)
        others = [other.detach().requires_grad_(own.requires_grad) for other, own in of_both]
        step.buffers.inputs[2, 2] = grouped_like(others, step.buffers.inputs[2, 2])
    run(step, i)


@fault("distributed.step_message:PlanMessage", "write_plan", c.LOSS)
def padding_counted(write: Any, message: Any, micro_batches: Any, weights: Any) -> None:
    """Divides by the number of all tokens, padding among them."""
    write(message, micro_batches, [float(targets[0].numel()) for _, targets in micro_batches])


@fault(STEP, "_score", c.LOSSES, said="the outputs of all layers agree.*other targets")
def targets_of_another_micro_batch(score: Any, step: Any, outputs: Any, micro_batch: int) -> Any:
    """Scores every micro-batch against the targets of the next."""
    return score(step, outputs, (micro_batch + 1) % 4)


@fault(STEP, "_output_gradients", c.GRADIENTS, said=r"layer norm \(cell 1\)", words=NO_AUXILIARY)
def boundary_gradient_halved(take: Any, step: Any, i: Any) -> list[Tensor | None]:
    """Halves the gradient that crosses one boundary, as if it were averaged over two senders."""
    return [None if gradient is None else gradient * (0.5 if i.cell == 1 else 1.0) for gradient in take(step, i)]


@fault("pipeline.tied_parameters:TiedParameters", "_brought_to", c.GRADIENTS, said="layer embed", words=TIED)
def tied_gradient_lost(brought_to: Any, ties: Any, owner: Any, use: Any) -> Any:
    """Leaves out the gradient of one use of a tied parameter."""
    return None if use.name.startswith("head") else brought_to(ties, owner, use)


@fault("pipeline.gradients", "begin_sum", c.GRADIENTS, words=REPLICAS)
def replicas_not_added_up(begin: Any, flat: Tensor, group: Any) -> Any:
    """Leaves every replica with its own gradients."""
    return lambda: None


@fault(UPDATER, "squared_norms", c.NORM)
def norm_of_one_cell(norms: Any, updater: Any) -> Tensor:
    """Takes the norm of the last cell's gradients for that of all."""
    squares: Tensor = norms(updater)
    squares[:-2] = 0  # all but the head's weight and bias
    return squares


@fault("trainer.update", "scale_gradients", c.STATE, said=r"layer norm \(cell 1\)")
def clipping_forgotten_in_a_cell(scale: Any, every: Any, factor: float) -> None:
    """Clips all cells but cell 1."""
    scale([*every[:3], *every[7:]], factor)  # without norm.weight, norm.bias and the judge's


@fault(UPDATER, "update", c.UPDATED, said="layer judge", words=(*TIED, "pipeline.workers=4"))
def tied_value_not_sent(update: Any, updater: Any, *rest: Any) -> None:
    """Gives the uses on other workers the owner's value before the first step only."""
    with mock.patch.object(type(updater._ties), "spread"):
        update(updater, *rest)


@fault("pipeline.batchnorm:DeferredBatchNorm", "_gather", c.BUFFERS, said="layer norm", words=("data.batch_size=14",))
def mean_of_unequal_means(gather: Any, norm: Any, statistics: Tensor) -> None:
    """Gives micro-batches of different sizes the same weight in BatchNorm's averages."""
    gather(norm, torch.cat([torch.full_like(statistics[:1], 64.0), statistics[1:]]))


@fault("pipeline.weight_casts:WeightCasts", "held", c.GRADIENTS, said="layer head", words=BF16)
def weight_casts_without_a_graph(held: Any, casts: Any) -> list[Tensor]:
    """Casts weights without a graph, so that nothing flows back to them."""
    return [cast.detach() for cast in casts._casts or ()]


@fault("pipeline.cell:Cell", "run_training", c.OUTPUTS, said="layer mix_0.*it depends on something", words=BF16)
def boundary_cast_left_out(run: Any, cell: Any, *arguments: Any) -> Any:
    """Leaves tensors between the layers of cell 0 in float32, as the layers return them."""
    left_out = mock.patch("gpipe_cli.pipeline.messages.boundary.passed_on", lambda outputs, inputs, dtype: outputs)
    with left_out if cell.number == 0 else nullcontext():
        return run(cell, *arguments)
