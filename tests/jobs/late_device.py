"""A device without hardware: tensors of a type of their own that compute on the CPU.

What it shows: an operation on tensors of two devices is an error, as on a GPU; every place where the host waits for the
device, or reads from it, is counted with its caller; bytes alive are counted. What it cannot show: streams and events,
kernels, NCCL, rounding of another device, its generators (random numbers come from the CPU's), pinned memory.

torch keeps PrivateUse1 for such devices; it has one name in a process, here `late`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from gpipe_cli.planner.measure.tracking import LiveBytes

NAME = "late"
_setup_privateuseone_for_python_backend(NAME)
torch.get_device_module(NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]  # autocast asks for it
LATE = torch.device(NAME, 0)
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")
BETWEEN = ("aten::copy_", "aten::_to_copy")  # may have operands on two devices


class LateTensor(torch.Tensor):
    """Holds a tensor of the device; its values lie in a CPU tensor."""

    _values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> LateTensor:
        made: LateTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=LATE,
            requires_grad=False,
        )
        made._values = values
        METER.count(values)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LateTensor({self._values})"

    def tolist(self) -> Any:
        """Returns the values; torch refuses this to tensors of a type of their own."""
        METER.wait("tolist")
        return self._values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Meter(LiveBytes):
    """Counts what happens on the device.

    Attributes:
        waits: the callers of every operation for which the host waits, while `waiting` is watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] | None = None

    def wait(self, what: str) -> None:
        if self.waits is not None:
            own = [frame for frame in traceback.extract_stack() if "gpipe_cli" in frame.filename]
            place = own[-1] if own else traceback.extract_stack()[0]
            self.waits.append(f"{what} in {place.filename.rpartition('gpipe_cli/')[2]}:{place.name}")

    @contextmanager
    def waiting(self) -> Iterator[list[str]]:
        """Lists every wait inside the block."""
        self.waits = found = []
        try:
            yield found
        finally:
            self.waits = None


METER = Meter()


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation that has a tensor of the device, or makes one.

    Raises:
        RuntimeError: it has tensors of the CPU too.
    """
    name, device = func.name().partition(".")[0], kwargs.get("device")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    stays = device is None or torch.device(device).type == NAME
    if not name.startswith(BETWEEN) and not name.startswith("aten::set_"):
        _refuse_mixture(name, tensors)
    if name in READS or (name == BETWEEN[1] and not stays):
        METER.wait(name)
    if name == BETWEEN[0] and not isinstance(tensors[0], LateTensor):
        METER.wait("copy to the CPU")
    inner_kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
    inner_args, inner_kwargs = tree_map(_unwrapped, (args, inner_kwargs))
    out = func(*inner_args, **inner_kwargs)
    if not stays:
        return out
    wrappers = {id(leaf._values): leaf for leaf in tensors if isinstance(leaf, LateTensor)}
    if name == BETWEEN[0] and not isinstance(tensors[0], LateTensor):
        return args[0]
    return tree_map(lambda leaf: wrappers[id(leaf)] if id(leaf) in wrappers else _wrapped(leaf), out)


def _refuse_mixture(name: str, tensors: list[Tensor]) -> None:
    """Raises RuntimeError for tensors of two devices; numbers on the CPU are allowed, as CUDA allows them."""
    here = [leaf for leaf in tensors if isinstance(leaf, LateTensor)]
    elsewhere = [leaf for leaf in tensors if not isinstance(leaf, LateTensor) and leaf.dim() > 0]
    if here and elsewhere:
        raise RuntimeError(f"{name}: expected all tensors on one device, but found {LATE} and cpu")


def _unwrapped(leaf: Any) -> Any:
    if isinstance(leaf, LateTensor):
        return leaf._values
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _wrapped(leaf: Any) -> Any:
    return LateTensor(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, LateTensor) else leaf


def _make(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation that has no tensor of the device among its arguments, as torch.zeros(…, device="late")."""
    return run(func, args, kwargs)


_OTHERS = torch.library.Library("_", "IMPL", "PrivateUse1")
_OTHERS.fallback(_make)
_OWN = torch.library.Library("aten", "IMPL", "PrivateUse1")
for _kind in ("default", "start", "start_step"):  # torch's own makes an empty tensor, whose size changes later
    _arange = getattr(torch.ops.aten.arange, _kind)
    _OWN.impl(_arange.name(), partial(_make, _arange))
