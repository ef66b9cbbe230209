"""Keeps the `torch.autograd.Function`s of a module in its traced graph, with the backward that they define.

torch.export looks into them: it would keep the operations of their forward, whose gradients may be others. So while a
module is traced each call becomes an operation without content, in place of which the layers call the function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getattr_static
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import SymInt, Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointFunction

from .module import Untraceable

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)  # arguments that stay what they are
LIBRARY: Any = torch.library.Library("gpipe_traced", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
functions: dict[Any, Callable[..., list[Tensor]]] = {}  # operation -> what the layers call
_numbers = count()
_usual_apply: Any = getattr_static(Function, "apply")


@dataclass(frozen=True, eq=False)
class OwnFunction:
    """Calls an autograd function with tensors and sizes at their places among other arguments."""

    function: Any
    others: tuple[Any, ...]
    places: list[int]
    __name__ = "own_function"  # for torch.fx

    def filled(self, given: tuple[Any, ...]) -> list[Any]:
        """Returns all arguments, with the tensors and sizes `given` at their places."""
        whole = list(self.others)
        for place, value in zip(self.places, given, strict=True):
            whole[place] = value
        return whole

    def __call__(self, *given: Any) -> list[Tensor]:
        return _tensors(self.function.apply(*self.filled(given)))


@contextmanager
def own_backward_kept() -> Iterator[None]:
    """Traces each call of a user's `torch.autograd.Function` as one opaque operation, so that its backward is kept.

    Afterwards `functions` (above) has, for each such operation, what the layers call in its place: the user's function.
    """
    with patch.object(Function, "apply", classmethod(_apply)):
        yield


def _apply(function: type[Function], *arguments: Any) -> Any:
    """Replaces `Function.apply`: defines an operation for this call, calls it, and returns outputs of the same form."""
    if function is CheckpointFunction:  # it only computes again
        inside, _, *given = arguments
        return inside(*given)
    if function.__module__.partition(".")[0] == "torch":  # such as the backward of an operation made by torch.library
        return _usual_apply.__get__(None, function)(*arguments)
    places = [place for place, argument in enumerate(arguments) if isinstance(argument, (Tensor, SymInt))]
    others = tuple(None if place in places else argument for place, argument in enumerate(arguments))
    if not all(isinstance(argument, PLAIN) for argument in tree_iter(others)):
        raise Untraceable(f"here {function.__name__}, which has a backward of its own, gets a function or an object")
    answer: Any = None
    run = OwnFunction(function, others, places)

    def forward(*given: Any) -> list[Tensor]:
        nonlocal answer
        answer = _forward(function, run.filled(given))
        return [tensor.new_empty_strided(tensor.shape, tensor.stride()) for tensor in _tensors(answer)]

    # In the graph stands this operation; its fake implementation only says shapes, types and strides.
    name = f"function_{next(_numbers)}"
    takes = ", ".join(f"{'Tensor' if isinstance(arguments[place], Tensor) else 'SymInt'} a{place}" for place in places)
    LIBRARY.define(f"{name}({takes}) -> Tensor[]")
    torch.library.register_fake(f"gpipe_traced::{name}", forward, lib=LIBRARY)
    operation = getattr(torch.ops.gpipe_traced, name).default
    functions[operation] = run
    made = iter(operation(*(arguments[place] for place in places)))
    if isinstance(answer, Tensor):
        return next(made)
    return tuple(next(made) if isinstance(part, Tensor) else part for part in answer)


def _forward(function: type[Function], arguments: list[Any]) -> Any:
    """Returns the outputs of the function's forward, called as `Function.apply` does but without a graph."""
    context: Any = FunctionCtx()
    context.needs_input_grad = tuple(isinstance(given, Tensor) and given.requires_grad for given in arguments)
    if function.setup_context is Function.setup_context:
        answer = function.forward(context, *arguments)
    else:
        answer = function.forward(*arguments)
        function.setup_context(context, tuple(arguments), answer)
    return answer


def _tensors(answer: Any) -> list[Tensor]:
    """Returns the tensors among a function's outputs."""
    return [part for part in ((answer,) if isinstance(answer, Tensor) else answer) if isinstance(part, Tensor)]
