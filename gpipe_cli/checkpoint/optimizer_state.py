"""Finds the form of the state that an optimizer keeps for a parameter: by one step without memory or effect."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

Form = tuple[tuple[int, ...], torch.dtype] | None  # shape and type of a tensor; None: a number, a string or None


def form(value: object) -> Form:
    """Returns the form of one value."""
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def in_words(form: Form) -> str:
    """Returns a form for a message, such as float32[3, 4]."""
    return "no tensor" if form is None else f"{str(form[1]).removeprefix('torch.')}{list(form[0])}"


class StateForms:
    """Finds the forms of an optimizer's state, each once for all parameters that are alike."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        self._known: dict[tuple[int, Form], dict[str, Form] | None] = {}

    def faults(self, name: str, parameter: nn.Parameter, saved: Mapping[str, object]) -> list[str]:
        """Returns how a parameter's saved state differs from what the optimizer makes.

        Kernels that trust a shape write beyond the end of a smaller tensor.
        """
        found = []
        for key, wanted in (self.of(parameter) or {}).items() if saved else ():
            has = in_words(form(saved.get(key)))
            if key not in saved:
                found.append(f"optimizer state {key!r} of {name} is not in the checkpoint")
            elif form(saved[key]) != wanted:
                found.append(f"optimizer state {key!r} of {name} should be {in_words(wanted)}, saved is {has}")
        return found

    def of(self, parameter: nn.Parameter) -> Mapping[str, Form] | None:
        """Returns the forms of the state after the first step, by key; None: this optimizer cannot be tried."""
        if made := self._optimizer.state.get(parameter):  # some optimizers make it when they are made
            return {str(key): form(value) for key, value in made.items()}
        group = self._groups.get(id(parameter))
        if group is None:
            return {}
        key = id(group), form(parameter)
        if key not in self._known:
            # A few optimizers look at values, which a fake tensor has not.
            self._known[key] = _try(self._optimizer, group, parameter, FakeTensorMode()) or _try(
                self._optimizer, group, parameter, nullcontext()
            )
        return self._known[key]


def _try(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, mode: AbstractContextManager[Any]
) -> dict[str, Form] | None:
    """Takes the first step of a copy of the optimizer with one parameter of this shape; None where it fails."""
    trial = object.__new__(type(optimizer))
    trial.__dict__.update({key: copy.copy(value) for key, value in optimizer.__dict__.items() if key != "state"})
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    with mode:
        weight = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))
        weight.grad = torch.zeros_like(weight)
        trial.state = defaultdict(dict)
        trial.param_groups = [{**group, "params": [weight]}]
        try:
            type(optimizer).step(trial)
        except Exception:  # an optimizer of the user's own may raise anything; after it has made its state it may
            if not trial.state[weight]:
                return None
        return {str(key): form(value) for key, value in trial.state[weight].items()}
