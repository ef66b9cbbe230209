"""Checks the arguments of `Pipeline.of` and of its methods, before any message is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_type_hints

import torch
from torch import Tensor, nn

from ..config import PipelineConfig
from ..errors import ConfigurationError, Problems
from ..layers import LayerBuilder, name_used_twice
from ..micro_batch import MicroBatch, Tensors, refuse_unlike_lengths
from ..tasks.base import Task
from ..tasks.own_loss import LossFunctionTask
from ..typed_section import read_values

Side: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"  # inputs or targets


@dataclass(frozen=True)
class Inputs:
    """Says how a micro-batch's inputs are given.

    Attributes:
        names: of a module's arguments, in the order in which they travel; empty: by position.
        shared: names of those that are not divided, but the same for all micro-batches.
    """

    names: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @classmethod
    def of(cls, example: Any, shared: Sequence[str], is_module: bool) -> tuple[Inputs, MicroBatch]:
        """Returns how the example's inputs are given, and the example as a micro-batch.

        Raises:
            ConfigurationError: it is none; inputs have names for a list of layers; or ``shared`` names another.
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
            ConfigurationError: they are no tensors, or have other names.
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
        ConfigurationError: they are neither a tensor nor some tensors.
    """
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, (tuple, list)) or not value or not all(isinstance(one, Tensor) for one in value):
        found = "None: rank 0 gives them" if value is None else f"a {type(value).__name__}"
        raise ConfigurationError(f"{name} are a tensor, or a tuple of tensors, but are {found}")
    return tuple(value)


def one_of(letter: str, value: int | None, word: str, other: int | None) -> int:
    """Returns the value of an argument that has two names.

    Raises:
        ConfigurationError: both are given, or none.
    """
    if (value is None) == (other is None):
        raise ConfigurationError(f"Pipeline.of: give {letter}=, or {word}= for the same, one of them")
    return value if value is not None else other  # type: ignore[return-value]  # one is given


def task_of(loss: object, weight: Callable[[Any], Any] | None, answer: Callable[[Tensors], Any]) -> Task:
    """Returns the task of a loss function, which gets the ``answer`` of the outputs; or a task as it is.

    Raises:
        ConfigurationError: it is neither, or a task has a weight beside its own.
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
        ConfigurationError: it has a line for each other one.
    """
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigurationError(f"autocast={autocast!r}: only None, torch.bfloat16 or torch.float16")
    problems = Problems()
    hints = get_type_hints(PipelineConfig, include_extras=True) | {"seed": int, "steps": int}
    lists = {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}
    found = read_values(hints, lists, "", problems)
    problems.refuse()
    return found


def listed(layers: object) -> Sequence[LayerBuilder]:
    """Returns the layers.

    Raises:
        ConfigurationError: they are no list of layers, or two have one name.
    """
    if not isinstance(layers, Sequence) or not layers or not all(isinstance(one, LayerBuilder) for one in layers):
        raise ConfigurationError(
            "layers are a module, which is traced, or a list of LayerBuilder(name, build), where build() makes a "
            f"module, but are a {type(layers).__name__}"
        )
    for layer in layers:
        if isinstance(layer.build, nn.Module) or not callable(layer.build):
            kind = type(layer.build).__name__
            raise ConfigurationError(
                f"LayerBuilder({layer.name!r}, build): build makes the module when it is called, as "
                f"functools.partial({kind}, …), but is a {kind}"
            )
    if (twice := name_used_twice(layers)) is not None:
        raise ConfigurationError(f"there are two layers named {twice!r}: rename one")
    return layers
