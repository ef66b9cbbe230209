"""Refuses code that tracing would lose or cannot follow: names it, its line and the way out."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import ConfigurationError, place_in_users_code
from .module import CallError, Constructor, Untraceable, copied

WAY_OUT = "change that, or write the model as a list of layers (docs/your-own-model.md)"
NEVER_CALLED = ("begin_step", "auxiliary_loss")  # optional methods of a layer
SEEDS = "here forward seeds the random generators, whose numbers are the engine's: make what it draws in __init__"
REPLACED = "here forward replaces a tensor's values by .data = …, which recomputing would repeat"
GRADIENT = "here forward computes a gradient, which a layer cannot do"
UNTRACEABLE = {  # what torch says -> what the code does
    "an uninitialized parameter": "its parameters get a shape only from the first input (nn.LazyLinear): give sizes",
    "has no attribute 'constant'": GRADIENT,  # torch.func.grad
    r"\.numpy\(\) is not supported": "here a tensor becomes a numpy array: compute with torch",
    "UnsupportedOperator": "here runs an operation that needs values, as those of nested and sparse tensors do",
    "DataDependent|data-dependent": (
        "here the code depends on the values of a tensor, as `if x.sum() > 0`: use torch.where, or multiply by a mask"
    ),
    "failed to unpack the object": "here a tensor's value is a size, as with pack_padded_sequence: mask the padding",
    r"forward\(\) missing|unexpected keyword argument|positional arguments? but": (
        "its forward does not take the data's tensors: name its arguments, model.inputs=[…] and model.arguments={…}"
    ),
}


class TraceError(ConfigurationError):
    """Raised for a module that cannot be traced; names the place in its code and the way out."""


def refuse_module(module: object) -> None:
    """Refuses a module that a trace cannot keep whole, where no comparison would show the loss.

    Raises:
        CallError: it is no module.
        Untraceable: it is scripted, or has methods of a list's layers.
    """
    if not isinstance(module, nn.Module):
        raise CallError(f"it makes a {type(module).__name__}; what returns layers is named by model._target_ alone")
    for name, part in module.named_modules():
        name = name or type(part).__name__
        if isinstance(part, torch.jit.ScriptModule):
            raise Untraceable(f"its module {name} is made by TorchScript: use the class from which that was made")
        if methods := [method for method in NEVER_CALLED if callable(getattr(part, method, None))]:
            raise Untraceable(f"its module {name} has {methods[0]}(), which only a layer of a list has called")
        if part._backward_hooks or part._backward_pre_hooks:
            raise Untraceable(f"its module {name} has a hook on gradients, which its layers would not call")
        if part._state_dict_hooks or type(part).get_extra_state is not nn.Module.get_extra_state:
            raise Untraceable(f"its module {name} changes its state_dict by a hook or extra state, which exports lack")
    for name, parameter in nn.Module.named_parameters(module):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise Untraceable(
                f"its parameter {name} has a hook on its gradient, which its layers would not call: "
                "trainer.gradient_clip, or torch.nn.utils in a loop of your own, limits gradients"
            )


class Following(TorchFunctionMode):
    """Refuses calls of torch within the context that a trace does not follow. All numbers count as finite."""

    def __init__(self) -> None:
        super().__init__()
        self._finite: dict[int, tuple[Tensor, bool]] = {}  # id -> tensor of isfinite (isnan, …), and its values

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("generator") is not None:
            raise Untraceable("here numbers are drawn from a generator of its own; leave out generator=…")
        if function in (torch.autograd.grad, Tensor.backward):
            raise Untraceable(GRADIENT)
        if function is Tensor.random_ and len(args) == 3:  # the overload `from`, a word of Python, in torch's code
            return args[0].random_(args[2] - args[1]).add_(args[1])
        known, name = self._finite.get(id(next(iter(args), None))), getattr(function, "__name__", "")
        if known is not None and function is Tensor.__bool__:
            return known[1]
        answer = function(*args, **(kwargs or {}))
        if name in ("isfinite", "isnan", "isinf"):
            self._finite[id(answer)] = answer, name == "isfinite"
        if known is not None and name in ("all", "any"):
            self._finite[id(answer)] = answer, known[1]
        return answer


def refuse_seeding(*arguments: object, **more: object) -> None:
    """Refuses seeding, in place of the functions that seed torch's generators."""
    raise Untraceable(SEEDS)


def refuse_data(tensor: Tensor, values: object) -> None:
    """Refuses ``tensor.data = …``, in place of the assignment."""
    raise Untraceable(REPLACED)


def explained(error: Exception, constructor: Constructor) -> str:
    """Returns the message that refuses code: what it does, its place in the user's code, the way out."""
    name = name_of(constructor)
    if isinstance(error, CallError):
        return f"{name}: {error}"
    said, place = (str(error), error.place) if isinstance(error, Untraceable) else ("", None)
    for pattern, text in UNTRACEABLE.items():
        if not said and re.search(pattern, f"{type(error).__name__}: {error}"):
            said = text
    if not said:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = f"here tracing ends with {type(error).__name__}: {' '.join(lines[:2])}"
    place = place or place_in_users_code(error)
    return f"{name} cannot be traced: {f'{place}: ' if place else ''}{said}; {WAY_OUT}"


def told_with_place(error: BaseException) -> str:
    """Returns an exception's place in the user's own code, its type and its message."""
    place = place_in_users_code(error)
    return f"{f'{place}: ' if place else ''}{type(error).__name__}: {error}"


def name_of(constructor: Constructor) -> str:
    """Returns the constructor's name as the user typed it, or the class of a module that a program made."""
    made_by: Any = getattr(constructor, "func", constructor)
    typed = "model.module._target_="
    if isinstance(constructor, partial) and made_by is copied:
        typed, made_by = "the module ", type(constructor.args[0])
    return f"{typed}{made_by.__module__}.{made_by.__qualname__}"
