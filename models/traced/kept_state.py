"""Refuses a module that keeps something of a call for a later one, because a trace repeats one call."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ...errors import own_place
from .flatten import memory_of
from .module import Called, Untraceable
from .refusals import in_forward

Key = tuple[str, str]  # (name of a module, attribute)
CONTAINERS = (list, tuple, set, deque, dict)
PLAIN = (type(None), bool, int, float, str)
OF_CLASS = "type(self)."
DEPTH = 4  # of containers and objects in each other


class KeptState:
    """Watches what a module's calls leave in the module.

    Args:
        called: the module, and how it is called.
    """

    def __init__(self, called: Called) -> None:
        self._called = called
        self._saved = {part: {name: _copied(value) for name, value in vars(part).items()} for part in called.modules()}
        self._changed: set[Key] = set()

    def restore(self) -> None:
        """Gives the module back what it had."""
        for part, saved in self._saved.items():
            training = part.training
            vars(part).clear()
            vars(part).update({name: _copied(value) for name, value in saved.items()})
            part.training = training

    def _change_modes(self) -> None:
        """Calls eval() and train().

        Raises:
            Untraceable: they change a parameter, as code does that merges an adapter into a weight.
        """
        versions = {name: parameter._version for name, parameter in self._called.module.named_parameters()}
        with torch.no_grad():
            self._called.eval()
            self._called.train()
        for name, parameter in self._called.module.named_parameters():
            if parameter._version != versions.get(name):
                raise Untraceable(f"its train() or eval() changes the parameter {name}: compute it in forward")

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes within the context what each call changes, before torch.export can put it back."""
        forward, begun = Called.forward, self._state()
        self._change_modes()
        self._changed |= _differing(begun, self._state())
        plain = {id(value) for held in self._saved.values() for value in held.values() if isinstance(value, Tensor)}

        def watched(called: Called, *tensors: Tensor) -> Tensor:
            before = self._state()
            with in_forward(plain):
                output = forward(called, *tensors)
            self._changed |= _differing(before, self._state())
            return output

        with patch.object(Called, "forward", watched):
            yield

    def refuse_what_is_kept(self, inputs: tuple[Tensor, ...]) -> None:
        """Calls the module again, where calls have changed it, to see whether a later call reads the change.

        Args:
            inputs: without values.

        Raises:
            Untraceable: a later call reads it, or it is a parameter, a buffer or a module.
        """
        if not self._changed:
            return
        self.restore()
        self._called.train()
        with _Dependence(self._called, inputs) as dependence:
            self._called(*inputs)
        first = self._state()
        self._called.train()
        reads, writes = self._second_call(inputs)
        second = self._state()
        self._called.eval()
        reads |= self._second_call(inputs)[0]
        for key in sorted(self._changed):
            name, attribute = key
            part = self._called.get_submodule(name)
            place = writes.get(key) or reads.get(key)
            shown = ".".join(filter(None, (name.removeprefix("module").removeprefix("."), attribute)))
            for kind, held in (("parameter", "_parameters"), ("buffer", "_buffers"), ("module", "_modules")):
                if attribute in {**self._saved[part][held], **getattr(part, held)}:
                    flag = "the requires_grad of " if kind == "parameter" else ""
                    raise Untraceable(f"here forward replaces {flag}the {kind} {shown}", place)
            is_kept = key in _differing(first, second) or dependence.is_in(getattr(part, attribute, None))
            if is_kept and (key in reads or attribute.startswith(OF_CLASS)):
                raise Untraceable(f"here the module keeps {shown} for its next call: a trace repeats one call", place)
        self.restore()

    def _second_call(self, inputs: tuple[Tensor, ...]) -> tuple[dict[Key, str | None], dict[Key, str | None]]:
        """Returns what was changed earlier and is read before it is written, and what is written, with the places."""
        names = {self._called.get_submodule(name): name for name, _ in self._changed}
        reads: dict[Key, str | None] = {}
        writes: dict[Key, str | None] = {}

        def note(events: dict[Key, str | None], part: nn.Module, attribute: str) -> None:
            key = names.get(part, ""), attribute
            if part in names and key in self._changed and key not in writes and key not in events:
                events[key] = own_place(traceback.walk_stack(None))

        usual: Callable[..., None] = nn.Module.__setattr__
        places = {id(p): (part, n) for part in names for n, p in part._parameters.items()}

        def freeze(tensor: Tensor, requires_grad: bool = True) -> Tensor:
            if id(tensor) in places:
                note(writes, *places[id(tensor)])
            tensor.requires_grad = requires_grad
            return tensor

        def get(part: nn.Module, attribute: str) -> Any:
            if not attribute.startswith("__"):
                note(reads, part, attribute)
            return object.__getattribute__(part, attribute)

        def put(part: nn.Module, attribute: str, value: Any) -> None:
            note(writes, part, attribute)
            usual(part, attribute, value)

        with (
            patch.object(nn.Module, "__getattribute__", get, create=True),
            patch.object(nn.Module, "__setattr__", put),
            patch.object(Tensor, "requires_grad_", freeze),
        ):
            self._called(*inputs)
        return reads, writes

    def _state(self) -> dict[Key, Any]:
        """Returns what can be compared of all attributes; modules of torch itself keep nothing but parameters."""
        state: dict[Key, Any] = {}
        for name, part in self._called.named_modules():
            state |= {(name, n): (_Same(p), p.requires_grad) for n, p in part._parameters.items() if p is not None}
            state |= {(name, n): _Same(value) for n, value in (part._buffers | part._modules).items()}
            if type(part).__module__.partition(".")[0] != "torch":
                own = vars(part).items()
                state |= {(name, n): _comparable(v) for n, v in own if n != "training" and n not in vars(EMPTY)}
                state |= {(name, OF_CLASS + n): _comparable(v) for n, v in _of_class(type(part)) if _is_data(v)}
        return state


EMPTY = nn.Module()


class _Same:
    """Equals another one of the same object, which it keeps: a new object could get the place of one that is gone."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]  # not needed, and dangerous beside this __eq__


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a class and its bases, but for torch's."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            yield from ((name, value) for name, value in vars(base).items() if not name.startswith("__"))


def _is_data(value: Any) -> bool:
    return isinstance(value, (*PLAIN, *CONTAINERS, Tensor))


def _differing(before: Mapping[Key, Any], after: Mapping[Key, Any]) -> set[Key]:
    return {key for key in {*before, *after} if before.get(key, EMPTY) != after.get(key, EMPTY)}


def _copied(value: Any) -> Any:
    return copy(value) if isinstance(value, CONTAINERS) else value


def _comparable(value: Any, depth: int = DEPTH) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor) or not depth:
        return _Same(value)
    if isinstance(value, Mapping):
        return [(key, _comparable(part, depth - 1)) for key, part in value.items()]
    if isinstance(value, CONTAINERS):
        return [_comparable(part, depth - 1) for part in value]
    if isinstance(value, (nn.Module, type)) or not hasattr(value, "__dict__"):
        return _Same(value)
    return _Same(value), [(key, _comparable(part, depth - 1)) for key, part in vars(value).items()]


class _Dependence(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Follows within the context which tensors depend on the values of inputs or parameters."""

    def __init__(self, called: Called, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = [tensor.untyped_storage() for tensor in (*inputs, *called.parameters())]
        self._memory = {storage._cdata for storage in self._kept}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if not name.endswith("_like") and not name.startswith("new_") and self.is_in((args, kwargs)):
            made = [tensor.untyped_storage() for tensor in tree_iter(answer) if isinstance(tensor, Tensor)]
            self._kept += made  # so that no other tensor gets the same place
            self._memory |= {storage._cdata for storage in made}
        return answer

    def is_in(self, tree: Any) -> bool:
        """Returns whether a tensor of nested values depends on them."""
        return any(isinstance(part, Tensor) and memory_of(part) in self._memory for part in tree_iter(tree))
