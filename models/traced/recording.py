"""Records how a module's constructor makes its tensors, without memory, and makes only some of them for real.

A worker needs the weights of its own cells, but random numbers must be drawn in the constructor's order. So the
constructor runs once on fake tensors, and its operations are recorded. Those are repeated with real tensors that the
wanted ones depend on, and those that draw random numbers, which fill a tensor that is thrown away.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from ...cpu import seeded

SEEDING = ("manual_seed", "seed", "set_rng_state")
TRUNCATED = init._no_grad_trunc_normal_  # draws again until every value is inside: one operation here


class NotRecordable(Exception):
    """Raised for a constructor whose operations cannot be repeated, as of one that looks at values."""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses a module's printing and warnings within the context, and torch's logs."""
    prints, disabled = StringIO(), logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(prints), redirect_stderr(prints):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def plainly() -> Iterator[None]:
    """Makes torch's modules compute within the context by the operations that they train with in one process.

    nn.SyncBatchNorm computes as nn.BatchNorm. nn.TransformerEncoder uses no faster operations in evaluation, and does
    not look at a mask's values. torch.distributions do not check their values.
    """
    transformer: Any = torch.nn.modules.transformer
    with (
        patch.object(torch.distributed, "is_initialized", lambda: False),
        patch.object(torch.distributions.Distribution, "_validate_args", False),
        patch.object(torch.backends.mha, "get_fastpath_enabled", lambda: False),
        patch.object(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal)),
    ):
        yield


class _View:
    """Describes a tensor of the recording by its storage and its place there.

    The tensor itself may get another storage later, by ``.data = …``.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()  # kept, so that no other one gets its address
        self.key, self.dtype = self._storage._cdata, tensor.dtype
        self.layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._value = None if isinstance(tensor, FakeTensor) else tensor

    def real(self, memory: dict[int, torch.UntypedStorage]) -> Tensor:
        """Returns the real tensor in place of this one; ``memory`` holds real storages by key."""
        if self._value is not None:  # a constant, as of torch.tensor(0)
            return self._value.detach().clone()
        if self.key not in memory:  # random numbers go here that only advance the generator
            return torch.empty_strided(*self.layout[1:], dtype=self.dtype)
        return torch.empty(0, dtype=self.dtype).set_(memory[self.key], *self.layout)


@dataclass(frozen=True)
class _Operation:
    """Holds one operation with its arguments and results, `_View`s in place of tensors."""

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    answers: list[_View]

    @property
    def keys(self) -> set[int]:
        """Returns the storages that it uses."""
        return {part.key for part in (*tree_iter(self.arguments), *self.answers) if isinstance(part, _View)}

    @property
    def changed(self) -> set[int]:
        """Returns the storages that may get new values."""
        schema = getattr(self.function, "_schema", None)
        return self.keys if schema is None or schema.is_mutable else {view.key for view in self.answers}

    @property
    def draws(self) -> bool:
        """Returns whether it draws random numbers."""
        return self.function is TRUNCATED or torch.Tag.nondeterministic_seeded in getattr(self.function, "tags", ())

    def repeat(self, memory: dict[int, torch.UntypedStorage]) -> None:
        """Runs the operation on real tensors; ``memory`` gets the storages that it makes, by key."""
        arguments, keywords = tree_map_only(_View, lambda view: view.real(memory), self.arguments)
        made = [tensor for tensor in tree_iter(self.function(*arguments, **keywords)) if isinstance(tensor, Tensor)]
        for view, tensor in zip(self.answers, made, strict=True):
            if view.key not in memory:
                if (tensor.storage_offset(), tensor.shape, tensor.stride()) != view.layout:
                    raise NotRecordable("torch lays a tensor out in another way where it has values")
                memory[view.key] = tensor.untyped_storage()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.note(function, *args, **(kwargs or {}))

    def note(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an operation and records it; `TRUNCATED` is not run, because it looks at values."""
        given = tree_map_only(Tensor, _View, (args, kwargs))
        answer = args[0] if function is TRUNCATED else function(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise NotRecordable("the constructor has a generator of its own")
        answers = [_View(tensor) for tensor in tree_iter(answer) if isinstance(tensor, Tensor)]
        if any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tree_iter(answer)):
            raise NotRecordable("the constructor fills tensors on meta from a file, as from_pretrained does")
        if function is not TRUNCATED and function._schema.name.endswith("_") and answers:  # type: ignore[attr-defined]
            answers[0] = given[0][0]  # of a copied parameter without values torch returns another object
        self.operations.append(_Operation(function, given, answers))
        return answer


@dataclass(frozen=True)
class ConstructorRecord:
    """Holds the operations of a constructor, run under a seed.

    Attributes:
        named: parameters and buffers that it left in the module, and further tensors that it made.
    """

    seed: int
    operations: list[_Operation]
    named: dict[str, _View]

    def name(self, name: str, tensor: Tensor) -> bool:
        """Adds a further tensor to `named`; returns False if the constructor has not made it."""
        view = _View(tensor)
        if is_made := any(view.key == answer.key for operation in self.operations for answer in operation.answers):
            self.named[name] = view
        return is_made

    def made(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Makes real tensors by name, with the values that the constructor draws under the seed.

        Raises:
            NotRecordable: torch makes a tensor with another layout in memory than without values.
        """
        wanted = {name: self.named[name] for name in names}
        keys, needed = {view.key for view in wanted.values()}, set()  # storages, and operations on which they depend
        for number, operation in reversed([*enumerate(self.operations)]):
            if keys & operation.changed or (
                operation.draws and len(operation.keys) > 1  # it draws by probabilities in a tensor
            ):
                needed.add(number)
                keys |= operation.keys
        memory: dict[int, torch.UntypedStorage] = {}
        with seeded(self.seed), torch.no_grad():
            for number, operation in enumerate(self.operations):
                if number in needed:
                    operation.repeat(memory)
                elif operation.draws:
                    operation.repeat({})
            return {name: view.real(memory) for name, view in wanted.items()}


def recorded(
    constructor: Callable[[], nn.Module], seed: int, fake: FakeTensorMode
) -> tuple[nn.Module, ConstructorRecord]:
    """Constructs a module on fake tensors, and returns it with the record of the operations.

    Raises:
        NotRecordable: the constructor looks at values, seeds by itself, or reads weights from a file.
    """
    recorder = _Recorder()
    seeds: list[object] = []
    patches: Any = dict.fromkeys(SEEDING, lambda *arguments: seeds.append(arguments)) | {"load": _refuse_file}
    try:
        with (
            seeded(seed),
            quiet(),
            patch.multiple(torch, **patches),
            patch.object(init, TRUNCATED.__name__, partial(recorder.note, TRUNCATED)),
            fake,
            recorder,
        ):
            module = constructor()
            named: list[tuple[str, Tensor]] = [*nn.Module.named_parameters(module, remove_duplicate=False)]
            named += nn.Module.named_buffers(module, remove_duplicate=False)
    except Exception as error:
        raise NotRecordable(str(error)) from error
    if seeds:
        raise NotRecordable("the constructor seeds by itself")
    return module, ConstructorRecord(seed, recorder.operations, {name: _View(tensor) for name, tensor in named})


def _refuse_file(*arguments: object, **more: object) -> None:
    raise NotRecordable("without memory, torch.load gives tensors without values")
