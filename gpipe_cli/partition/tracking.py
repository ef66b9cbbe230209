"""Records operations on tensors: their FLOPs, the bytes that they move, and the bytes alive meanwhile."""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_HALF = (torch.bfloat16, torch.float16)
# Operations that neither compute nor move data:
_NO_WORK = ("aten::empty", "aten::detach", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "prim::")


class Operation(NamedTuple):
    """Describes one kernel: its FLOPs (a multiply-add is two), bytes read and written, and True for half precision."""

    flops: float
    bytes: float
    half: bool


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Lists the operations that run inside the context, and counts the bytes of the storages that they make.

    Storages that exist already, such as weights, are passed to `ignore` and do not count.

    Attributes:
        operations: operations since the last `begin`.
        now: bytes alive now.
        peak: most bytes alive since the last `begin`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.operations: list[Operation] = []
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._ignored: set[int] = set()

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leaves out the storages of tensors, which the caller keeps alive for as long as the tracker is used."""
        self._ignored |= {storage_key(tensor) for tensor in tensors}

    def begin(self) -> None:
        """Starts a new list of operations and a new peak."""
        self.operations, self.peak = [], self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        for tensor in made:
            self._watch(tensor)
        if not func.is_view and not func.name().startswith(_NO_WORK):
            read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            on_gpu = getattr(torch.ops.aten, func._overloadpacket.__name__.replace("_for_cpu", ""), None)
            count = flop_registry.get(func._overloadpacket, flop_registry.get(on_gpu))  # torch counts a GPU's attention
            flops = 0.0 if count is None else float(count(*args, **kwargs, out_val=out))  # not every kernel is counted
            moved = sum(tensor.numel() * tensor.element_size() for tensor in (*read, *made))
            half = any(tensor.dtype in _HALF for tensor in read)
            self.operations.append(Operation(flops, float(moved), half))
        return out

    def _watch(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor, once, for as long as it lives."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        # A storage that is not resizable is not torch's: a slot of memory that two workers share.
        if key in self._ignored or key in self._alive or not storage.resizable():
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)


def storage_key(tensor: Tensor) -> int:
    """Returns a number that is equal for tensors that share memory, while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def noting_saved(sizes: dict[int, int]) -> AbstractContextManager[Any]:
    """Returns the context in which each storage that autograd saves for backward is noted.

    Args:
        sizes: gets the bytes of each, by `storage_key`.
    """

    def note(tensor: Tensor) -> Tensor:
        # Not the tensor itself: an output that its own graph saves would never be freed.
        sizes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    return torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept)
