"""Compares a traced model with the module itself: whole for gpipe-verify, and by a quick look when a run starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cpu import free_memory
from ..errors import ConfigurationError, place_in_users_code
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch
from ..models.traced.compare import COPIES, ModuleFailed, compare, maker_of
from ..models.traced.layers import LayerMaker
from ..models.traced.refusals import WAY_OUT, name_of
from ..partition.cost import count_parameters, layer_costs
from ..tasks.base import Task

EXAMPLES = 2  # of a quick look's micro-batch; BatchNorm needs two
LONGEST = 3.0  # seconds that a quick look may take
RUNS = 16  # forwards' worth of a quick look: two sides, two rounds, forward, backward and evaluation
FLOPS, PARAMETERS = 4e10, 1.2e7  # a second: of one core; constructed, changed and compared on both sides
SMALLER = "a smaller one with the same code, as by model.module.n_layer=2 or what its arguments are called"


@dataclass(frozen=True)
class ModuleReport:
    """Says how the traced layers compare with the module itself.

    Attributes:
        line: in one sentence.
        agrees: None where they were not compared.
    """

    line: str
    agrees: bool | None


def is_traced(builders: Sequence[LayerBuilder]) -> bool:
    """Returns whether the model is a traced module."""
    return isinstance(builders[0].build, LayerMaker)


def compare_with_module(
    builders: Sequence[LayerBuilder], micro_batches: Sequence[MicroBatch], task: Task
) -> ModuleReport:
    """Compares the layers of a traced module with the module itself, on the CPU."""
    parameters, free = sum(count_parameters(builders)), free_memory()
    needed = parameters * 4 * COPIES
    if free is not None and needed > free:
        return ModuleReport(
            f"not compared: {COPIES} times its {parameters:,} parameters take {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; verify {SMALLER}",
            None,
        )
    try:
        found, decided = compare(builders, micro_batches, lambda x, y: task.loss(x, y)[0] / (task.weight(y) or 1.0))
    except ModuleFailed as error:
        return ModuleReport(
            f"DIFFERENT: the module itself fails where its layers do not: {_told(error.__cause__)}", False
        )
    except Exception as error:
        return ModuleReport(f"not compared: {_told(error)}", None)
    what = f"{found.compared} outputs, gradients, buffers and requires_grad, in training and in evaluation"
    if found.beyond:
        named = "; ".join(map(str, found.beyond[:3]))
        return ModuleReport(f"DIFFERENT in {len(found.beyond)} of {what}: {named}", False)
    if found.relative == 0:
        return ModuleReport(f"the same bits ({what})", True)
    decided = f"; in float64, for in float32 {decided}" if decided else ""
    return ModuleReport(f"the same but for rounding, at most {found.worst} ({what}{decided})", True)


def _told(error: BaseException | None) -> str:
    place = None if error is None else place_in_users_code(error)
    return f"{f'{place}: ' if place else ''}{type(error).__name__}: {error}"


def quick_look(
    builders: Sequence[LayerBuilder], task: Task, micro_batch: MicroBatch, say: Callable[[str], None]
) -> None:
    """Compares a traced module with itself where that takes a few seconds.

    Args:
        micro_batch: of which two examples are enough.
        say: receives a line about what was compared, or not.

    Raises:
        ConfigurationError: they differ.
    """
    inputs, targets = (tuple(t[:EXAMPLES] if t.dim() else t for t in tensors) for tensors in micro_batch)
    costs = layer_costs(builders, inputs, "flops")
    seconds = RUNS * sum(layer.cost for layer in costs) / FLOPS + sum(layer.parameters for layer in costs) / PARAMETERS
    if seconds > LONGEST:
        say(
            "the module itself: not compared, as it is too large for a quick look: gpipe-verify with the same words "
            f"compares it, or {SMALLER}"
        )
        return
    report = compare_with_module(builders, [(inputs, targets)], task)
    if report.agrees is False:
        raise ConfigurationError(
            f"{name_of(maker_of(builders[0]).traced_from.constructor)}: its layers, traced, do not compute what the "
            f"module itself does: {report.line}; {WAY_OUT}"
        )
    say(f"the module itself: {report.line}")
