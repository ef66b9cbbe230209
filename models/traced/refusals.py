"""Refuses what tracing would lose, and says of what cannot be traced what it is, where it stands and the way out."""

from __future__ import annotations

import inspect
import random
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from ...errors import ConfigurationError, place_in_users_code
from .module import CallError, Constructor, Untraceable

WAY_OUT = "change that, or write the model as a list of layers (docs/your-own-model.md)"
USUAL_DATA: Any = torch._C.TensorBase.data
SEEDS = "here forward seeds the random generator: numbers are drawn by the run's seed, step and layer"
REFUSED: list[tuple[Any, str, str]] = [
    (torch.inference_mode, "__enter__", "here torch.inference_mode stands within training: use torch.no_grad"),
    (torch, "manual_seed", SEEDS),
    (torch, "set_rng_state", SEEDS),
    (torch.random, "fork_rng", SEEDS),
]
LOST: dict[Any, str] = {  # calls that a trace does not follow
    Tensor.register_hook: "here the gradient of a tensor gets a hook, which a traced layer would not call",
    torch.autograd.grad: "here forward computes a gradient, which tracing does not follow",
}
UNTRACEABLE = {  # what torch says -> what the code does
    "DataDependent|data-dependent": "here the code depends on the values of a tensor, as `if x.sum() > 0` does",
    r"forward\(\) missing|unexpected keyword argument|positional arguments? but": (
        "its forward does not take the input tensors of the data: name its arguments with model.inputs=[…], further "
        "ones with model.arguments={…}"
    ),
}


class TraceError(ConfigurationError):
    """Raised for a module that cannot be traced; names the place in its code and the way out."""


def refuse_module(module: object) -> None:
    """Refuses what a constructor has made if no trace could keep all of it.

    Raises:
        CallError: it is no module, or one without code of its own.
        Untraceable: it has hooks on gradients, or parameters without a shape.
    """
    if not isinstance(module, nn.Module):
        raise CallError(
            f"it makes a {type(module).__name__}, no nn.Module; a function that returns a list of layers is named by "
            "model._target_ alone, without model=module"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise CallError("it makes a TorchScript module: name the class from which that was made")
    memory: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise Untraceable(
                f"its parameter {name} gets a shape only from the first input (nn.LazyLinear): give sizes"
            )
        first = memory.setdefault(parameter.untyped_storage()._cdata, name)
        if first != name:
            raise Untraceable(f"its parameters {first} and {name} share memory: make them one nn.Parameter")
        if parameter.is_complex():
            raise Untraceable(f"its parameter {name} is complex: keep a real one, and use torch.view_as_complex")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise Untraceable(f"its parameter {name} has a hook on its gradient, which a traced layer would not call")
    for name, part in module.named_modules():
        iterators = [attribute for attribute, value in vars(part).items() if hasattr(value, "__next__")]
        if iterators:
            raise Untraceable(
                f"its module {name or 'itself'} keeps an iterator, {iterators[0]}, which each call moves on"
            )
        if part._backward_hooks or part._backward_pre_hooks:
            raise Untraceable(f"its module {name} has a hook on gradients, which a traced layer would not call")


@contextmanager
def refusing_what_gets_lost() -> Iterator[None]:
    """Refuses code that runs within the context if a trace would not repeat what it does.

    Raises:
        Untraceable: it hooks a gradient, computes one, or draws from Python's or numpy's generator.
    """
    before = _states()
    with (
        patch.object(fx.proxy.TracerBase, "_filter_traceback_frames", lambda _, frames: frames, create=True),
        _data(lambda tensor: tensor if isinstance(tensor, nn.Parameter) else USUAL_DATA.__get__(tensor)),
    ):
        yield
    if _states() != before:
        raise Untraceable(
            "its forward draws from the generator of Python or numpy: the trace would keep the numbers of one draw for "
            "ever; draw with torch.rand"
        )


@contextmanager
def in_forward(plain: Collection[int]) -> Iterator[None]:
    """Makes `.data` traceable within the context, which is the module's forward alone, without torch.export's own code.

    Args:
        plain: ids of tensors in the module that are neither parameters nor buffers.

    Raises:
        Untraceable: the code replaces `.data`, changes such a tensor, switches to inference, or has its own generator.
    """
    with ExitStack() as stack:
        for holder, name, said in REFUSED:
            stack.enter_context(patch.object(holder, name, _refused(getattr(holder, name), said)))
        stack.enter_context(_Refusing(plain))
        stack.enter_context(_data(Tensor.detach, _refuse_data))
        yield


def _data(get: Callable[[Tensor], Tensor], put: Callable[[Tensor, Any], None] | None = None) -> Any:
    """Replaces the property `data` of tensors; torch.export asks a parameter for it to make a constant of it."""
    return patch.object(Tensor, "data", property(get, put or USUAL_DATA.__set__), create=True)


def _refuse_data(tensor: Tensor, value: object) -> None:
    raise Untraceable("here forward puts new values into `.data`")


class _Refusing(TorchFunctionMode):
    """Refuses random numbers from a generator of its own, changes of plain tensors, and len() of a size that varies."""

    def __init__(self, plain: Collection[int]) -> None:
        super().__init__()
        self._plain = plain

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in LOST:
            raise Untraceable(LOST[function])
        if (kwargs or {}).get("generator") is not None:
            raise Untraceable("here numbers are drawn from a generator of its own; leave out generator=…")
        if function is Tensor.__len__ and isinstance(args[0].shape[0], torch.SymInt):
            raise Untraceable("here len() of a tensor makes its size a constant: use x.shape[0]")
        version = args[0]._version if args and id(args[0]) in self._plain else 0
        answer = function(*args, **(kwargs or {}))
        if args and id(args[0]) in self._plain and args[0]._version != version:
            raise Untraceable("here forward changes a tensor that is no parameter and no registered buffer")
        return answer


def _states() -> tuple[object, str]:
    return random.getstate(), str(np.random.get_state())


def _refused(usual: Callable[..., Any], said: str) -> Callable[..., Any]:
    """Returns a function that refuses the module's code, and serves torch's own."""

    def function(*arguments: Any, **more: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] != "torch" or caller == "torch.utils._contextlib":  # which is that of a decorator
            raise Untraceable(said)
        return usual(*arguments, **more)

    return function


def explained(error: Exception, constructor: Constructor) -> str:
    """Returns what cannot be traced, its place in the user's code and the way out."""
    name = name_of(constructor)
    if isinstance(error, CallError):
        return f"{name}: {error}"
    said, place = (str(error), error.place) if isinstance(error, Untraceable) else ("", None)
    for pattern, text in UNTRACEABLE.items():
        if not said and re.search(pattern, f"{type(error).__name__}: {error}"):
            said = text
    if not said:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = f"torch.export says: {type(error).__name__}: {' '.join(lines[:2])}"
        if re.search("(image|input).*(height|width|size)", said, re.IGNORECASE):
            said += " (data.image_size=… gives images of that many pixels a side)"
    place = place or place_in_users_code(error) or _defined(constructor)
    return f"{name} cannot be traced: {f'{place}: ' if place else ''}{said}; {WAY_OUT}"


def _defined(constructor: Constructor) -> str | None:
    """Returns file and line of what makes the module; None where it is a library's."""
    made_by: Any = getattr(constructor, "func", constructor)
    with suppress(TypeError, OSError):
        file, line = inspect.getsourcefile(made_by), inspect.getsourcelines(made_by)[1]
        return None if file is None or "site-packages" in file else f"{file}, line {line}"
    return None


def name_of(constructor: Constructor) -> str:
    """Returns what a user has typed to name the constructor."""
    made_by = getattr(constructor, "func", constructor)
    return f"model.module._target_={made_by.__module__}.{made_by.__qualname__}"
