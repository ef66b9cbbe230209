"""Registers a device without hardware: tensors of a type of their own, whose operations run on the CPU.

What it shows: mixing devices is an error; every wait of the host for the device is listed with its caller, and the time
of an event that the host has not waited for is an error. What it cannot show: streams, memory, kernels, NCCL, autocast,
the rounding of another device, its generators (random numbers come from the CPU's), times.

torch keeps PrivateUse1 for such devices; it has one name in a process, here `other`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "other"
_setup_privateuseone_for_python_backend(NAME)
OTHER = torch.device(NAME, 0)
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")
BETWEEN = ("aten::copy_", "aten::_to_copy")  # may have operands on two devices


# -- where the host waits ----------------------------------------------------------------------------------------------


class Waits:
    """Lists the callers of every operation for which the host waits for the device, while that is watched."""

    number = 0
    places: list[str] | None = None

    def add(self, what: str) -> None:
        self.number += 1
        if self.places is not None:
            own = [frame for frame in traceback.extract_stack() if "gpipe_cli" in frame.filename]
            place = own[-1] if own else traceback.extract_stack()[0]
            self.places.append(f"{what} in {place.filename.rpartition('gpipe_cli/')[2]}:{place.name}")

    @contextmanager
    def listed(self) -> Iterator[list[str]]:
        """Lists every wait inside the block."""
        self.places = found = []
        try:
            yield found
        finally:
            self.places = None


WAITS = Waits()


class Event:
    """Implements the methods of torch.cuda.Event; it has passed when the host has waited since it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._recorded = WAITS.number

    def record(self, stream: object = None) -> None:
        self._recorded = WAITS.number

    def query(self) -> bool:
        return WAITS.number > self._recorded

    def synchronize(self) -> None:
        if not self.query():
            WAITS.add("Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("an event has not been reached yet")
        return 0.0


# -- tensors and operations --------------------------------------------------------------------------------------------


class OtherTensor(torch.Tensor):
    """Holds a tensor of the device; its values lie in a CPU tensor."""

    _values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OtherTensor:
        place = {"strides": values.stride(), "storage_offset": values.storage_offset(), "device": OTHER}
        kind = {"dtype": values.dtype, "layout": values.layout, "requires_grad": False}
        made: OtherTensor = torch.Tensor._make_wrapper_subclass(cls, values.size(), **place, **kind)  # type: ignore[attr-defined]
        made._values = values
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OtherTensor({self._values})"

    def tolist(self) -> Any:
        """Returns the values; torch refuses this to tensors of a type of their own."""
        WAITS.add("tolist")
        return self._values.tolist()

    @property  # type: ignore[misc]
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: OtherTensor) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._values = other._values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


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
    to_host = not stays if name == BETWEEN[1] else name == BETWEEN[0] and not isinstance(tensors[0], OtherTensor)
    if name in READS or to_host:
        WAITS.add("copy to the CPU" if name == BETWEEN[0] else name)
    inner_args, inner_kwargs = tree_map(_unwrapped, (args, kwargs))
    if "device" in kwargs:
        inner_kwargs["device"] = torch.device("cpu")
    out = func(*inner_args, **inner_kwargs)
    if to_host:
        return args[0] if name == BETWEEN[0] else out
    given = {id(leaf._values): leaf for leaf in tensors if isinstance(leaf, OtherTensor)}
    return tree_map(lambda leaf: given[id(leaf)] if id(leaf) in given else _wrapped(leaf), out)


def _refuse_mixture(name: str, tensors: list[Tensor]) -> None:
    """Raises RuntimeError for tensors of two devices; numbers on the CPU are allowed, as CUDA allows them."""
    here = [leaf for leaf in tensors if isinstance(leaf, OtherTensor)]
    elsewhere = [leaf for leaf in tensors if not isinstance(leaf, OtherTensor) and leaf.dim() > 0]
    if here and elsewhere:
        raise RuntimeError(f"{name}: expected all tensors on one device, but found {OTHER} and cpu")


def _unwrapped(leaf: Any) -> Any:
    if isinstance(leaf, OtherTensor):
        return leaf._values
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _wrapped(leaf: Any) -> Any:
    return OtherTensor(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, OtherTensor) else leaf


def _make(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation that has no tensor of the device among its arguments, as torch.zeros(…, device="other")."""
    return run(func, args, kwargs)


_OTHERS = torch.library.Library("_", "IMPL", "PrivateUse1")
_OTHERS.fallback(_make)
_OWN = torch.library.Library("aten", "IMPL", "PrivateUse1")
for _kind in ("default", "start", "start_step"):  # torch's own makes an empty tensor, whose size changes later
    _arange = getattr(torch.ops.aten.arange, _kind)
    _OWN.impl(_arange.name(), partial(_make, _arange))


# -- as a kind of device -----------------------------------------------------------------------------------------------


_module: Any = torch.get_device_module(NAME)
_module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # torch.utils.checkpoint asks for it, in later tests too
_module.Event, _module.current_stream = Event, lambda device=None: None
_module.synchronize = lambda device=None: WAITS.add("synchronize")
_module.max_memory_reserved = lambda device=None: 0


@contextmanager
def runs_on(kind: str) -> Iterator[None]:
    """Makes this kind of device that of the runs inside the block, as pipeline.device=auto finds a GPU."""
    world, device = "gpipe_cli.distributed.world", torch.device(kind, None if kind == "cpu" else 0)
    chosen = patch(f"{world}.choose_device", lambda *_: device), patch(f"{world}.device_identity", lambda _: kind)
    with chosen[0], chosen[1], patch.object(Tensor, "pin_memory", Tensor.clone):
        yield
