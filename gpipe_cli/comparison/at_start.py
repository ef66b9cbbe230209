"""Compares a traced model with the module itself when a run, or gpipe-verify, starts."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import Settings
from ..cpu import free_memory
from ..errors import ConfigurationError
from ..factory.build import build_optimizer
from ..factory.groups import Groups
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch, Tensors
from ..models.traced.layers import LayerMaker, TracedLayer
from ..models.traced.refusals import WAY_OUT, name_of, told_with_place
from ..partition.survey import survey
from ..pipeline.cell import BuiltLayer
from ..tasks.base import Task
from ..tasks.own_loss import LossFunctionTask
from .module_itself import COPIES, Compared, Given, Loss, compare, maker_of

TRUSTED = (
    "What tracing got wrong would train in silence: compare a smaller one with the same code, by what its arguments "
    "are called; model.trust=true then trains this"
)


def is_traced(builders: Sequence[LayerBuilder]) -> bool:
    """Returns whether the model is a traced module."""
    return isinstance(builders[0].build, LayerMaker)


def given_by(settings: Settings, task: Task, micro_batches: Sequence[MicroBatch]) -> Given:
    """Returns the micro-batches, loss and optimizer of a run, which both sides of the comparison get."""
    groups = Groups(settings.optimizer)

    def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        for name, parameter in named:
            if groups.freezes(groups.key(name, parameter.shape)):
                parameter.requires_grad_(False)
        return build_optimizer(settings.optimizer, groups.divided(named), settings.seed)

    return Given(micro_batches, mean_loss(task), optimizer)


def mean_loss(task: Task) -> Loss:
    """Returns a function that computes a micro-batch's loss per unit of weight."""
    trial = task.unwatched() if isinstance(task, LossFunctionTask) else task

    def loss(outputs: Tensors, targets: Tensors) -> Tensor:
        return trial.loss(outputs, targets)[0] / (trial.weight(targets) or 1.0)

    return loss


def compare_at_start(builders: Sequence[LayerBuilder], given: Given, say: Callable[[str], None]) -> list[int]:
    """Compares a traced module with itself on the CPU, unless the user trusts its layers.

    Args:
        say: receives a line about what was compared.

    Returns:
        The fewest examples of a micro-batch, and the fewest tokens of a text, for `refuse_fewer`.

    Raises:
        ConfigurationError: they differ, or could not be compared.
    """
    traced_from = maker_of(builders[0]).traced_from
    if traced_from.trusted:
        say("the module itself: not compared, as model.trust=true says")
        return [1, 1]
    name = name_of(traced_from.constructor)
    parameters, free = sum(survey(builders).sizes), free_memory()
    if (needed := parameters * 4 * COPIES) > free:
        short = f"{COPIES} times its {parameters:,} parameters take {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"
        raise ConfigurationError(f"{name}: not compared with its layers: {short}. {TRUSTED}")
    try:
        compared = compare(builders, given)
    except Exception as error:
        said = told_with_place(error.__cause__ or error)
        raise ConfigurationError(f"{name}: not compared with its layers: {said}. {TRUSTED}") from error
    if compared.found.beyond:
        raise ConfigurationError(
            f"{name}: its layers, traced, do not compute what the module itself does: {_in_words(compared)}. "
            f"A trace has lost part of its code: {WAY_OUT}"
        )
    say(f"the module itself: {_in_words(compared)}")
    return [compared.fewest, compared.shortest]


def _in_words(compared: Compared) -> str:
    """Returns what was compared and how far both sides differ, for the console."""
    found = compared.found
    what = f"{found.compared} outputs, gradients, buffers and updated weights of calls in training and in evaluation"
    if found.beyond:
        return f"DIFFERENT in {len(found.beyond)} of {what}: {'; '.join(map(str, found.beyond[:3]))}"
    same = f"the same but for rounding, at most {found.worst}" if found.relative else "the same bits"
    alone = {"one example": compared.fewest, "texts of one token": compared.shortest}
    other = " or ".join(name for name, least in alone.items() if least > 1)
    refused = f"; with {other} they differ, and the run refuses such micro-batches" if other else ""
    return f"{same} ({what}){refused}"


def refuse_fewer(layers: Sequence[BuiltLayer], fewest: int, shortest: int) -> None:
    """Makes the first layer of a traced module refuse smaller micro-batches, on the worker that has it."""
    for layer in layers:
        if layer.index == 0 and isinstance(layer.module, TracedLayer):
            layer.module.require(fewest, shortest)
