"""Registers a device without hardware: tensors of a type of their own, whose operations run on the CPU, late.

An operation is put into a queue of the present stream and runs some time later. Which stream goes on next is drawn from
a seed; only the order within a stream, events, and the host's waiting are kept. Until its operation has run a result
holds NaN (or an index out of range), and memory that has been freed is overwritten when the stream that it was made on
comes to that place. So a missing event, wait or `record_stream` gives an error or other numbers.

What it shows: mixing devices is an error; every wait of the host for the device is listed with its caller. What it
cannot show: memory, kernels, NCCL, autocast, the rounding of another device, its generators (random
numbers come from the CPU's, at once), times.

torch keeps PrivateUse1 for such devices; it has one name in a process, here `late`.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "late"
_setup_privateuseone_for_python_backend(NAME)
LATE = torch.device(NAME, 0)
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")
BETWEEN = ("aten::copy_", "aten::_to_copy")  # may have operands on two devices
AT_ONCE = ("aten::set_", "aten::resize_", "aten::_resize_output_")  # they change what a tensor is


# -- streams and events ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Mark:
    """Holds a place in a stream, for events."""

    passed: bool = False


@dataclass(eq=False)
class Stream:
    """Holds the operations of a stream that have not run: a function, a mark to pass, or a mark to wait for."""

    device: Any = None
    queue: deque[tuple[str, Any]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        QUEUES.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            QUEUES.add(self, "wait", event.mark)

    def synchronize(self) -> None:
        QUEUES.run_until(self.record_event().query)


class Event:
    """Implements the methods of torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.mark = Mark()
        QUEUES.add(current_stream() if stream is None else stream, "mark", self.mark)

    def query(self) -> bool:
        return self.mark is None or self.mark.passed

    def synchronize(self) -> None:
        if not self.query():
            METER.wait("Event.synchronize")
        QUEUES.run_until(self.query)

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("an event has not been reached yet")
        return 0.0


class Queues:
    """Runs the streams' operations, in an order drawn from a seed."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.draw = random.Random(0)
        self._running = False

    def add(self, stream: Stream, kind: str, what: Any) -> None:
        stream.queue.append((kind, what))
        if self.draw.random() < 0.1:
            for _ in range(self.draw.randrange(20)):
                self.run_one()

    def run_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if not self.run_one():
                raise RuntimeError("the host waits for what no stream will do")

    def run_all(self) -> None:
        while self.run_one():
            pass

    def run_one(self) -> bool:
        """Runs the first operation of a stream that need not wait; returns whether there was one."""
        ready = [stream for stream in self.streams if stream.queue and not _must_wait(*stream.queue[0])]
        if self._running or not ready:
            return False
        kind, what = self.draw.choice(ready).queue.popleft()
        if kind == "mark":
            what.passed = True
        elif kind == "run":
            self._running = True
            try:
                with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
                    what()
            finally:
                self._running = False
        return True


def _must_wait(kind: str, what: Any) -> bool:
    return kind == "wait" and not what.passed


QUEUES = Queues()
DEFAULT = Stream()
_PRESENT = threading.local()


def current_stream(device: object = None) -> Stream:
    return getattr(_PRESENT, "stream", DEFAULT)


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before, _PRESENT.stream = current_stream(), chosen
    try:
        yield
    finally:
        _PRESENT.stream = before


def synchronize(device: object = None) -> None:
    METER.wait("synchronize")
    QUEUES.run_all()


# -- memory, and where the host waits ----------------------------------------------------------------------------------


class Meter:
    """Lists the callers of every operation for which the host waits for the device, while that is watched."""

    waits: list[str] | None = None

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


class Memory:
    """Holds the memory of tensors: the stream that it was made on, and those that keep it alive (`record_stream`)."""

    of: ClassVar[dict[int, Memory]] = {}  # by storage

    def __init__(self, values: Tensor) -> None:
        self.storage = values.untyped_storage()
        self.stream, self.users, self.tensors = current_stream(), set[Stream](), 0
        self.of[self.storage._cdata] = self

    @classmethod
    def behind(cls, values: Tensor) -> Memory:
        return cls.of.get(values.untyped_storage()._cdata) or cls(values)

    def free(self) -> None:
        """Gives the memory away: the next tensor of its stream may overwrite it when the users' work is done."""
        del self.of[self.storage._cdata]
        for user in self.users:
            self.stream.wait_stream(user)
        QUEUES.add(self.stream, "run", partial(self.storage.fill_, 0xFF))  # NaN in every type of floats


class Lease:
    """Keeps the memory of one tensor."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        memory.tensors += 1

    def __del__(self) -> None:
        self.memory.tensors -= 1
        if self.memory.tensors == 0 and not sys.is_finalizing():
            self.memory.free()


# -- tensors and operations --------------------------------------------------------------------------------------------


class LateTensor(torch.Tensor):
    """Holds a tensor of the device; its values lie in a CPU tensor, once the operations before have run."""

    _values: Tensor
    _lease: Lease

    @staticmethod
    def __new__(cls, values: Tensor) -> LateTensor:
        place = {"strides": values.stride(), "storage_offset": values.storage_offset(), "device": LATE}
        kind = {"dtype": values.dtype, "layout": values.layout, "requires_grad": False}
        made: LateTensor = torch.Tensor._make_wrapper_subclass(cls, values.size(), **place, **kind)  # type: ignore[attr-defined]
        made._values, made._lease = values, Lease(Memory.behind(values))
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LateTensor({self.read('repr')})"

    def read(self, what: str) -> Tensor:
        """Returns the values when all before them has run."""
        METER.wait(what)
        current_stream().synchronize()
        return self._values

    def tolist(self) -> Any:
        """Returns the values; torch refuses this to tensors of a type of their own."""
        return self.read("tolist").tolist()

    def record_stream(self, user: Any) -> None:
        self._lease.memory.users.add(user)

    @property  # type: ignore[misc]
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: LateTensor) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._values, self._lease = other._values, other._lease

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
    to_host = not stays if name == BETWEEN[1] else name == BETWEEN[0] and not isinstance(tensors[0], LateTensor)
    kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
    if name in READS or to_host:
        METER.wait("copy to the CPU" if name == BETWEEN[0] else name)
    returns, draws = func._schema.returns, torch.Tag.nondeterministic_seeded in func.tags
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    if name in READS or to_host or draws or name in AT_ONCE:
        current_stream().synchronize()
    if name in READS or to_host or draws or name in AT_ONCE or is_view:
        inner_args, inner_kwargs = tree_map(_unwrapped, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        if to_host:
            return args[0] if name == BETWEEN[0] else out
        given = {id(leaf._values): leaf for leaf in tensors if isinstance(leaf, LateTensor)}
        return tree_map(lambda leaf: given[id(leaf)] if id(leaf) in given else _wrapped(leaf), out)
    return _queued(name, func, args, kwargs, tensors)


def _queued(name: str, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Puts an operation into the present stream; its results have the sizes that it gives for zeros."""
    # A copy from memory that is not pinned is over when the call returns; from pinned memory it reads later.
    args, kwargs = tree_map(_kept, (args, kwargs))
    zeros = {id(leaf): _zeros(leaf) for leaf in tensors if isinstance(leaf, LateTensor)}
    zero_args, zero_kwargs = tree_map(lambda leaf: zeros.get(id(leaf), _unwrapped(leaf)), (args, kwargs))
    tried = func(*zero_args, **zero_kwargs)
    given = {id(zeros[id(leaf)]): leaf for leaf in tensors if id(leaf) in zeros}
    made = [leaf for leaf in tree_leaves(tried) if isinstance(leaf, Tensor) and id(leaf) not in given]
    inner_args, inner_kwargs = tree_map(_unwrapped, (args, kwargs))
    order = [isinstance(leaf, Tensor) and id(leaf) not in given for leaf in tree_leaves(tried)]

    def work() -> None:
        found = [leaf for leaf, new in zip(tree_leaves(func(*inner_args, **inner_kwargs)), order, strict=True) if new]
        for place, value in zip(made, found, strict=True):
            place.copy_(value)

    for place in made:
        place.untyped_storage().fill_(0xFF)
    results = {id(place): LateTensor(place) for place in made}
    if not name.startswith(("aten::empty", "aten::new_empty")):
        QUEUES.add(current_stream(), "run", work)
    return tree_map(lambda leaf: given.get(id(leaf), results.get(id(leaf), leaf)), tried)


def _zeros(like: LateTensor) -> Tensor:
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype).zero_()


def _kept(leaf: Any) -> Any:
    pinned = not isinstance(leaf, Tensor) or isinstance(leaf, LateTensor) or getattr(leaf, "is_pinned_here", False)
    return leaf if pinned else leaf.detach().clone()


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


# -- as a kind of device -----------------------------------------------------------------------------------------------


def pin_memory(tensor: Tensor, device: object = None) -> Tensor:
    copy: Any = tensor.clone()
    copy.is_pinned_here = True
    return copy


_module: Any = torch.get_device_module(NAME)
_module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # torch.utils.checkpoint asks for it, in later tests too
for _part in (Stream, Event, current_stream, stream, synchronize):
    setattr(_module, _part.__name__, _part)
_module.max_memory_reserved = lambda device=None: 0


@contextmanager
def runs_on(kind: str) -> Iterator[None]:
    """Makes this kind of device that of the runs inside the block, as pipeline.device=auto finds a GPU."""
    world, device = "gpipe_cli.distributed.world", torch.device(kind, None if kind == "cpu" else 0)
    QUEUES.draw.seed(0)
    chosen = patch(f"{world}.choose_device", lambda *_: device), patch(f"{world}.device_identity", lambda _: kind)
    pinned = patch.object(Tensor, "pin_memory", pin_memory if kind == NAME else Tensor.pin_memory)
    with chosen[0], chosen[1], pinned:
        yield
