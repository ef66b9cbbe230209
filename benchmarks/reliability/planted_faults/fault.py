"""Defines what a planted fault is, and the short ways to replace a function of gpipe_cli while one is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor, nn

from gpipe_cli.metrics.step_report import StepReport
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.engine import _TrainingStep
from gpipe_cli.schedule.instruction import Instruction, Op
from gpipe_cli.trainer.loop import Trainer

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """Describes a planted fault.

    Attributes:
        name: of the function that plants it.
        about: what goes wrong.
        plant: plants it while its context lasts.
        place, cause: regular expressions; the findings must contain both.
        words: of the command line, beside those of the subject.
        workers, replicas: more than one of either needs processes of their own.
    """

    name: str
    about: str
    plant: Plant
    place: str
    cause: str
    words: tuple[str, ...]
    workers: int
    replicas: int


FAULTS: dict[str, Fault] = {}


def fault(place: str, cause: str, *words: str, workers: int = 1, replicas: int = 1) -> Callable[[Plant], Plant]:
    """Registers the decorated function as a fault; its docstring says what goes wrong."""

    def register(plant: Plant) -> Plant:
        name, about = plant.__name__, str(plant.__doc__).splitlines()[0]
        assert name not in FAULTS
        FAULTS[name] = Fault(name, about, plant, place, cause, words, workers, replicas)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plants a fault inside the context; "" plants none."""
    with FAULTS[name].plant() if name else ExitStack():
        yield


# -- replacing a function ----------------------------------------------------------------------------------------------


def replaced(owner: object, name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replaces a function of a module or class by ``change(function, *arguments)``."""
    function = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *a, **k: change(function, *a, **k))


def several(*contexts: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Enters all contexts."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


def run_training(change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replaces a cell's run by ``change(run, cell, inputs, targets, step, micro_batch, signature, first_time)``."""
    return replaced(Cell, "run_training", change)


def before_update(change: Callable[[Trainer, StepReport], None]) -> AbstractContextManager[Any]:
    """Calls ``change`` before every update of the weights."""

    def changed(update: Callable[..., None], trainer: Trainer, report: StepReport) -> None:
        change(trainer, report)
        update(trainer, report)

    return replaced(Trainer, "_update", changed)


def after_update(change: Callable[[Trainer, dict[nn.Parameter, Tensor]], None]) -> AbstractContextManager[Any]:
    """Calls ``change`` after every update, with the weights before it."""

    def changed(update: Callable[..., None], trainer: Trainer, report: StepReport) -> None:
        before = {p: p.detach().clone() for cell in trainer.runtime.engine.cells for p in parameters(trainer, cell)}
        update(trainer, report)
        change(trainer, before)

    return replaced(Trainer, "_update", changed)


def around_backward(
    before: Callable[[_TrainingStep, Instruction], Any],
    after: Callable[[_TrainingStep, Instruction, Any], None] = lambda step, i, kept: None,
) -> AbstractContextManager[Any]:
    """Calls ``before`` and ``after`` around the backward of a cell; ``after`` gets what ``before`` returned."""

    def run(handler: Callable[..., None], step: _TrainingStep, i: Instruction) -> None:
        kept = before(step, i)
        handler(step, i)
        after(step, i, kept)

    return handlers_replaced(run, Op.BACKWARD, Op.INPUT_GRADIENT)


def handlers_replaced(change: Callable[..., None], *ops: Op) -> AbstractContextManager[Any]:
    """Replaces what a training step does for some operations by ``change(handler, step, instruction)``."""
    handlers = _TrainingStep.HANDLERS
    return mock.patch.dict(handlers, {op: partial(change, handlers[op]) for op in ops})


def parameters(trainer: Trainer, cell: int) -> list[nn.Parameter]:
    """Returns the parameters of a cell; none where another worker has it."""
    cells = trainer.runtime.engine.cells
    return [p for _, p in cells[cell].parameters()] if cell in cells else []


def cell_parameters(step: _TrainingStep, cell: int) -> list[nn.Parameter]:
    """Returns the parameters of a cell of this worker."""
    return [p for _, p in step.pipeline.cells[cell].parameters()]
