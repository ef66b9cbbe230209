"""Refuses what tracing would lose, and says of what cannot be traced what it is, where it stands and the way out."""

from __future__ import annotations

import inspect
import random
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ...errors import ConfigurationError, own_place, place_in_users_code
from .flatten import memory_of
from .module import Called, CallError, Constructor, Untraceable

Key = tuple[str, str]  # (name of a module, attribute)
CONTAINERS = (list, tuple, set, deque, dict)
PLAIN = (type(None), bool, int, float, str)
OF_CLASS = "type(self)."
DEPTH = 4  # of containers and objects in each other
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
            said = "gets a shape only from the first input (nn.LazyLinear): give sizes"
        elif (first := memory.setdefault(memory_of(parameter), name)) != name:
            said = f"shares the memory of {first}: make them one nn.Parameter"
        elif parameter.is_complex():
            said = "is complex: keep a real one, and use torch.view_as_complex"
        elif parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            said = "has a hook on its gradient, which a traced layer would not call"
        else:
            continue
        raise Untraceable(f"its parameter {name} {said}")
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


# -- what a call leaves for the next, because a trace repeats one call -------------------------------------------------


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
                state |= {(name, OF_CLASS + n): _comparable(v) for n, v in _of_class(type(part))}
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
    """Yields the data that a class and its bases hold, but for torch's."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            data = [(name, value) for name, value in vars(base).items() if not name.startswith("__")]
            yield from ((name, value) for name, value in data if isinstance(value, (*PLAIN, *CONTAINERS, Tensor)))


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
