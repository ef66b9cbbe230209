"""Checks the arguments of `Pipeline.of` and of its methods, before any message is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_type_hints

import torch
from torch import Tensor

from ..config import PipelineConfig
from ..distributed.step_message import refuse_unlike_lengths
from ..errors import ConfigurationError, Problems
from ..micro_batch import MicroBatch, Tensors
from ..tasks.base import Task
from ..tasks.own_loss import LossFunctionTask
from ..typed_section import read_values

Side: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"  # inputs or targets


@dataclass(frozen=True)
class Inputs:
    """Describes how the inputs of a micro-batch are given.

    Attributes:
        names: names of a module's arguments, in the order in which tensors travel; empty if they are given by position.
        shared: names of inputs that all micro-batches get whole.
    """

    names: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @classmethod
    def of(cls, example: Any, shared: Sequence[str], is_module: bool) -> tuple[Inputs, MicroBatch]:
        """Returns how the example's inputs are given, and the example as a micro-batch.

        Raises:
            ConfigurationError: the example is no pair; a list of layers has named inputs; ``shared`` names others.
        """
        if not isinstance(example, Sequence) or len(example) != 2:
            raise ConfigurationError("Pipeline.of(layers, loss, example): example is (inputs, targets)")
        names = tuple(example[0]) if isinstance(example[0], Mapping) else ()
        if names and not is_module:
            raise ConfigurationError("inputs by name are a module's; the first layer of a list gets them by position")
        if shared and (isinstance(shared, str) or not {*shared} < {*names}):
            raise ConfigurationError(
                f"shared={shared!r}: some, not all, of the names of inputs given as {{name: tensor}}"
            )
        given = cls(names, tuple(shared))
        inputs = given.tensors(example[0], "example[0], the inputs,")
        targets = tensors_of(example[1], "example[1], the targets,")
        refuse_unlike_lengths(inputs, targets)
        return given, (inputs, targets)

    def tensors(self, inputs: Side | None, name: str) -> Tensors:
        """Returns inputs in order; a shared one once for each example, without memory of its own.

        Raises:
            ConfigurationError: the inputs are no tensors, or have other names.
        """
        if not self.names:
            return tensors_of(inputs, name)
        if not isinstance(inputs, Mapping) or inputs.keys() != {*self.names}:
            found = ", ".join(inputs) if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
            raise ConfigurationError(f"{name} are the tensors {', '.join(self.names)} by name, but are {found}")
        ordered = dict(zip(self.names, tensors_of([inputs[one] for one in self.names], name), strict=True))
        (examples, *_) = next(tensor.shape for one, tensor in ordered.items() if one not in self.shared) or (0,)
        return tuple(t.expand(examples, *t.shape) if one in self.shared else t for one, t in ordered.items())


def tensors_of(value: object, name: str) -> Tensors:
    """Returns inputs or targets as a tuple.

    Raises:
        ConfigurationError: the value is neither a tensor nor a tuple or list of tensors.
    """
    if isinstance(value, Tensor):
        value = (value,)
    if not isinstance(value, (tuple, list)) or not value or not all(isinstance(one, Tensor) for one in value):
        found = "None: rank 0 gives them" if value is None else f"a {type(value).__name__}"
        raise ConfigurationError(f"{name} are a tensor, or a tuple of tensors, but are {found}")
    return tuple(value)


def without_graphs(inputs: Side | None) -> Side | None:
    """Returns a step's inputs; refuses any that autograd has computed from other tensors, which would get no gradient.

    Raises:
        ConfigurationError: an input was computed from what requires a gradient.
    """
    values = [inputs] if isinstance(inputs, Tensor) else inputs.values() if isinstance(inputs, Mapping) else inputs
    if any(isinstance(value, Tensor) and value.grad_fn is not None for value in values or ()):
        raise ConfigurationError(
            "inputs were computed from what requires a gradient, which step() would not give: detach() them, or make "
            "what computes them the first layer"
        )
    return inputs


def refuse_other_lengths(outputs: Tensors, targets: Tensors) -> None:
    """Raises ConfigurationError for outputs whose first dimension does not count examples, as targets' does."""
    for output in outputs:
        if output.dim() and len(output) != len(targets[0]):
            raise ConfigurationError(
                f"predict() joins outputs along their first dimension, but of {len(targets[0])} examples one has the "
                f"shape {list(output.shape)}: forward() returns those of each micro-batch"
            )


def one_of(letter: str, value: int | None, word: str, other: int | None) -> int:
    """Returns the value of an argument that has two names.

    Raises:
        ConfigurationError: both are given, or none.
    """
    if (value is None) == (other is None):
        raise ConfigurationError(f"Pipeline.of: give {letter}=, or {word}= for the same, one of them")
    return value if value is not None else other  # type: ignore[return-value]  # one is given


def refuse_unlike(everyones: Sequence[Mapping[str, str]]) -> None:
    """Raises ConfigurationError if processes call `Pipeline.of` with other values; ``everyones``: one dict a rank."""
    for rank, values in enumerate(everyones):
        for name, value in values.items():
            if value != everyones[0][name]:
                raise ConfigurationError(
                    f"Pipeline.of: {name} is {everyones[0][name]} on rank 0, but {value} on {rank}"
                )


def task_of(loss: object, weight: Callable[[Any], Any] | None, answer: Callable[[Tensors], Any]) -> Task:
    """Returns the task of a loss function, which gets the ``answer`` of the outputs; or a task as it is.

    Raises:
        ConfigurationError: ``loss`` is neither a function nor a task, or is a task given with a weight.
    """
    if isinstance(loss, Task) and weight is None:
        return loss
    if isinstance(loss, Task) or not callable(loss):
        raise ConfigurationError(
            "Pipeline.of(layers, loss, example): loss is a function, with weight= or not, or a task"
        )
    return LossFunctionTask(loss, weight, answer)


def checked(values: Mapping[str, Any], autocast: object) -> dict[str, Any]:
    """Returns arguments of `Pipeline.of` that have passed the checks of the keys of ``pipeline``.

    Raises:
        ConfigurationError: some values are wrong; the message has a line for each.
    """
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigurationError(f"autocast={autocast!r}: only None, torch.bfloat16 or torch.float16")
    problems = Problems()
    hints = get_type_hints(PipelineConfig, include_extras=True) | {"seed": int, "steps": int}
    lists = {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}
    found = read_values(hints, lists, "", problems)
    problems.refuse()
    return found
