"""Makes code traceable that torch.export would refuse or keep wrong, with the same results."""

from __future__ import annotations

import builtins
import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
import torch
from torch import SymFloat, SymInt, Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols, uninteresting_files

from ...errors import place_in_users_code
from .module import Call, Called
from .own_backward import own_backward_kept
from .recording import SEEDING, plainly, quiet
from .refusals import Following, refuse_data, refuse_seeding

MUTABLE = (list, dict, set, deque)
STATE, CHILDREN = {*vars(nn.Module())}, ("_parameters", "_buffers", "_modules")
DATA: Any = torch._C.TensorBase.data
Size = (SymInt, SymFloat)
SIZES = (1, 2, 3, 1000)  # examples of a size that depends on values, where it is not 0
ASKING = ("torch", "torch.fx.experimental.sym_node", "torch.fx.experimental.recording")  # between `if` and `evaluate`
uninteresting_files().add(__file__)  # for torch, which names the line that asks for a size
_length, _evaluate = builtins.len, ShapeEnv.evaluate_sym_node
fixed_at: dict[Any, str | None] = {}  # sizes of which a trace has made constants, and the user's line that needs them


class Traceable(Called):
    """Calls a module so that torch.export can follow its code.

    Args:
        module: the module, of which torch.export sees every call.
        call: description of how the module is called.

    Attributes:
        before: attributes as they were before any call.
        kept: attributes in which forward has kept tensors for others, as auxiliary losses; none before a call.
        numbers_follow: True if int() and float() of a size stay sizes in the module's files; tried if all else fails.
    """

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__(module, call)
        self.numbers_follow, self.kept = False, set[str]()
        self.before = Before(module)
        named = nn.Module.named_parameters(module, remove_duplicate=False)
        self._marks = {name: {**vars(parameter)} for name, parameter in named}  # torch.export calls with others

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        self.before.restore(registered=False)  # torch.export may call more than once
        with ExitStack() as stack:
            data = patch.object(Tensor, "data", property(Tensor.detach, refuse_data), create=True)
            seeding: Any = patch.multiple(torch, **dict.fromkeys(SEEDING, refuse_seeding))  # type: ignore[call-overload]
            forks = patch.object(torch.random, "fork_rng", refuse_seeding)
            for context in (plainly(), Following(), data, seeding, forks, patch.object(builtins, "len", length)):
                stack.enter_context(context)
            for name, parameter in nn.Module.named_parameters(self.module, remove_duplicate=False):
                marks = self._marks.get(name, {})
                vars(parameter).update({mark: value for mark, value in marks.items() if not hasattr(parameter, mark)})
            for space in self.before.files if self.numbers_follow else ():
                stack.enter_context(patch.dict(space, {n: kind for n, kind in NUMBERS.items() if n not in space}))
            made = super().forward(*(tensor.clone() for tensor in tensors))  # which code may change in place
            self.kept |= self.before.tensors_kept()
            return made


class Before:
    """Saves the attributes of a module, its classes and their files, so that what calls changed can be undone.

    Attributes:
        files: the namespace of each file.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = [*module.modules()]
        kinds = {kind for part in parts for kind in type(part).__mro__}
        kinds = {kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
        self.files = [vars(sys.modules[name]) for name in {kind.__module__ for kind in kinds} & sys.modules.keys()]
        self._attributes = [(part, {n: v for n, v in vars(part).items() if n not in STATE}) for part in parts]
        self._registered = [(value, copy(value)) for part in parts for n, value in vars(part).items() if n in CHILDREN]
        self._containers = [
            (value, copy(value))
            for space in (*(own for _, own in self._attributes), *map(vars, kinds), *self.files)
            for name, value in space.items()
            if type(value) in MUTABLE and not name.startswith("__") and value is not sys.modules
        ]
        packages = {kind.__module__.partition(".")[0] for kind in kinds}
        caches = [one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper]
        self._caches = [one for one in caches if str(one.__module__).partition(".")[0] in packages]

    def tensors_kept(self) -> set[str]:
        """Returns the attributes that hold a tensor now and did not before, as ``Router.loss``."""
        return {
            f"{type(part).__name__}.{name}"
            for part, saved in self._attributes
            for name, value in vars(part).items()
            if isinstance(value, Tensor) and name not in STATE and not isinstance(saved.get(name), Tensor)
        }

    def restore(self, registered: bool = True) -> None:
        """Restores all that was saved, and empties the caches of functools.lru_cache.

        Args:
            registered: True restores parameters and buffers too, which torch.export replaces during its calls.
        """
        for part, saved in self._attributes:
            own = vars(part)
            kept = {name: own[name] for name in STATE if name in own}
            own.clear()
            own.update(saved | kept)
        for container, contents in self._containers + (self._registered if registered else []):
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(contents)
        for cache in self._caches:
            cache.cache_clear()


@contextmanager
def traceable() -> Iterator[None]:
    """Makes torch.export follow calls within the context that it would refuse or lose."""
    with (
        quiet(),
        own_backward_kept(),
        patch.object(fx.proxy.TracerBase, "_filter_traceback_frames", lambda _, frames: frames, create=True),
        patch.object(ShapeEnv, "evaluate_sym_node", evaluate),
        patch.object(Tensor, "data", property(_data, DATA.__set__), create=True),
    ):
        yield


def _data(tensor: Tensor) -> Tensor:
    """Returns a tensor's `.data`; for a parameter itself, because its `.data` would become a constant of the trace."""
    data: Tensor = tensor if isinstance(tensor, nn.Parameter) else DATA.__get__(tensor)
    return data


def length(value: Any) -> Any:
    """Returns len() of a value; for a tensor the size that may vary, where len() would make it a constant."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else _length(value)


def _either(usual: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is ``symbolic`` for sizes and ``usual`` for other values."""
    return lambda value, *more: symbolic(value, *more) if isinstance(value, Size) else usual(value, *more)


NUMBERS = {"int": _either(int, torch.sym_int), "float": _either(float, torch.sym_float)}


def evaluate(environment: ShapeEnv, node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> Any:
    """Evaluates a condition in a module's code, in place of torch's method.

    A condition that only the size 0 would change, of sizes that depend on values, has its value for other sizes.
    """
    symbols, frame = free_unbacked_symbols(node.expr), sys._getframe(1)
    while str(frame.f_globals.get("__name__")) in ASKING and frame.f_back is not None:
        frame = frame.f_back
    by_torch = str(frame.f_globals.get("__name__")).startswith("torch.")
    if fallback_value is None and symbols and symbols <= environment.size_like and not by_torch:
        found = {node.expr.xreplace(dict.fromkeys(symbols, sympy.Integer(size))) for size in SIZES}
        if found in ({sympy.true}, {sympy.false}):
            fallback_value, environment.may_be_empty = found == {sympy.true}, True  # type: ignore[attr-defined]
    known = {*environment.replacements}
    answer = _evaluate(environment, node, size_oblivious, fallback_value)
    for symbol in environment.replacements.keys() - known:
        fixed_at.setdefault(environment.replacements[symbol], place_in_users_code(None))
    return answer
