"""Keeps plain values in the JSON of a checkpoint: the state of a scheduler, the options of an optimizer."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Parameter
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


def options_of(optimizer: Optimizer | None, named: Iterable[tuple[str, Parameter]]) -> list[Any]:
    """Returns the options of an optimizer's groups, as learning rates, with the names of their parameters, as JSON."""
    names, found = {id(parameter): name for name, parameter in named}, []
    for group in () if optimizer is None else optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        found.append([packed(options, "the optimizer's group"), own])
    return found


def set_options(optimizer: Optimizer, named: Iterable[tuple[str, Parameter]], saved: Iterable[Any]) -> None:
    """Sets the options of an optimizer's groups, as learning rates, to those that their parameters were saved with.

    Warns where the parameters of a group had different options, and leaves that group.

    Args:
        named: the parameters by the names under which they were saved.
        saved: what `options_of` returned, of all processes together: (options, names of parameters) of each group.
    """
    names = {id(parameter): name for name, parameter in named}
    options = {name: packed_options for packed_options, own in saved for name in own}
    for group in optimizer.param_groups:
        saved_options = [options.get(names.get(id(parameter), "")) for parameter in group["params"]]
        known = [one for one in saved_options if one is not None]  # of a parameter that was not saved there are none
        if any(one != known[0] for one in known):
            warnings.warn("the groups of the optimizer were others when it was saved: options stay", stacklevel=2)
            continue
        for name, value in unpacked(known[0]).items() if known else ():
            if isinstance(group.get(name), Tensor):  # as lr with capturable=True: kernels read its memory
                group[name].fill_(value)
            else:
                group[name] = value
