"""Keeps plain values in the JSON of a checkpoint: the state of a scheduler, the options of an optimizer."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigurationError


def packed(value: Any, name: str) -> Any:
    """Returns a value as JSON that `unpacked` makes equal again: keys may be numbers, and tuples stay tuples.

    Args:
        name: names the value in errors.

    Raises:
        ConfigurationError: part of it is neither a plain value, a list, a tuple, a dict, nor a tensor of one number.
    """
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, Mapping):
        return {"dict": [[packed(key, name), packed(one, f"{name}[{key!r}]")] for key, one in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [packed(one, name) for one in value]}
    if isinstance(value, list):
        return [packed(one, name) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(f"save(): {name} is a {type(value).__name__}; numbers, texts, lists and dicts are kept")


def unpacked(value: Any) -> Any:
    """Returns the value that `packed` made JSON of."""
    if isinstance(value, list):
        return [unpacked(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(unpacked(value["tuple"]))
    return {unpacked(key): unpacked(one) for key, one in value["dict"]}


def options_of(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Returns the options of each group of an optimizer, as learning rates, without its parameters."""
    groups = () if optimizer is None else optimizer.param_groups
    return [{name: value for name, value in group.items() if name not in ("params", "param_names")} for group in groups]


def set_options(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Gives the groups of an optimizer the options that `options_of` returned; warns where there are other groups."""
    if len(options) != len(optimizer.param_groups):
        warnings.warn(
            f"the checkpoint has {len(options)} groups of the optimizer, not {len(optimizer.param_groups)}: learning "
            "rates and other options stay as they are",
            stacklevel=2,
        )
        return
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for name, value in saved.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = value
