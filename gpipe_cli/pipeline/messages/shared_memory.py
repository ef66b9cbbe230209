"""Implements `Transport` for workers of one machine, with memory that they share.

gloo sends over TCP even there: a message is copied four times and wakes two threads beside the two workers, and where
cores are the devices this is computing time. Here the sender copies a message into a slot of shared memory and
announces it by 4 bytes on a socket; the receiver copies it out and returns the slot by one byte.

Neither memory (memfd) nor sockets have a name: the memory travels as a descriptor over a socket that the process group
of one machine hands from worker to worker. So nobody else gets in, and nothing is left behind however the processes
end; the end of one process is seen by the other as the end of the socket.
"""

import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...micro_batch import Tensors
from ...schedule.instruction import Message, send_window
from .boundary import BoundarySpec, unpack
from .transport import DIRECTIONS, Transport, Wait, routes

_NUMBER = struct.Struct("=i")  # of a slot; also the form of a descriptor
_BYTE = b"\0"
_PATIENCE = 1800.0  # seconds, as a process group's: the end of a peer is seen at once, this is for one that hangs


def slot_bytes(message: int) -> int:
    """Returns the bytes of a slot for a message of this many bytes: whole pages."""
    return -(-message // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemoryTransport(Transport):
    """Sends messages through shared memory; descriptions, and messages without content, as `Transport` does.

    Its ``control`` is the group of one machine's workers, which also connects them by sockets.
    """

    def _connect(self) -> None:
        """Opens a socket to each neighbour for each direction."""
        control: Any = self._control
        self._outgoing: dict[tuple[str, int], Outgoing] = {}  # by direction and receiver
        self._incoming: dict[tuple[str, int], Incoming] = {}  # by direction and sender
        window = send_window(len(set(self._ranks)))
        for direction, sender, receiver in routes(self._ranks):
            number = 1 + DIRECTIONS.index(direction)
            if self._rank == sender:
                peer = _patient(control.connect(receiver, number), _PATIENCE)
                self._outgoing[direction, receiver] = Outgoing(peer, receiver, window)
            elif self._rank == receiver:
                peer = _patient(control.accept(sender, number), _PATIENCE)
                self._incoming[direction, sender] = Incoming(peer, sender, self._device)

    def send(self, message: Message, tensors: Sequence[Tensor], spec: BoundarySpec) -> None:
        """Copies a message into shared memory and announces it."""
        if not spec.size:
            super().send(message, tensors, spec)
        else:
            self._outgoing[message.direction, self._ranks[message.receiver]].send(tensors, spec)

    def post(self, message: Message, spec: BoundarySpec) -> Wait:
        """Returns the function that waits for a message; see `Transport.post`."""
        if not spec.size:
            return super().post(message, spec)
        channel = self._incoming[message.direction, self._ranks[message.sender]]
        return lambda separate: channel.receive(spec)  # every tensor gets memory of its own


class _Slot:
    """Holds shared memory for one message at a time."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        self.size = os.fstat(descriptor).st_size
        memory = mmap.mmap(descriptor, self.size)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
        self._spec: BoundarySpec | None = None
        self._tensors: Tensors = ()

    def tensors(self, spec: BoundarySpec) -> Tensors:
        """Returns views of the slot, one for each tensor of a message that ``spec`` describes.

        They are made once for messages that are alike.
        """
        if self._spec is not spec:
            self._spec, self._tensors = spec, unpack(self._bytes, spec)
        return self._tensors


class Outgoing:
    """Sends the messages of one direction to one worker.

    Args:
        peer: connected socket.
        receiver: rank, for error messages.
        window: the most messages on their way; the next one waits until the receiver has taken the oldest.
    """

    def __init__(self, peer: socket.socket, receiver: int, window: int) -> None:
        self._peer, self._receiver, self._window = peer, receiver, window
        self._on_their_way: deque[_Slot] = deque()
        self._free: list[_Slot] = []

    def send(self, tensors: Sequence[Tensor], spec: BoundarySpec) -> None:
        """Copies a message into a slot and announces it to the receiver.

        Raises:
            RuntimeError: the receiver has ended, or the window is full and the receiver takes nothing for too long.
        """
        slot, new_memory = self._slot_for(spec.size)
        for place, tensor in zip(slot.tensors(spec), tensors, strict=True):
            place.copy_(tensor.detach() if tensor.requires_grad else tensor)
        try:
            if new_memory is None:
                self._peer.sendall(_NUMBER.pack(slot.number))
            else:
                socket.send_fds(self._peer, [_NUMBER.pack(slot.number)], [new_memory])
        except OSError as error:
            raise _lost(self._receiver, error) from None
        finally:
            if new_memory is not None:
                os.close(new_memory)
        self._on_their_way.append(slot)
        if not self._free:  # now, since before the next message it would delay the receiver
            self._take_back(wait=False)

    def _slot_for(self, size: int) -> tuple[_Slot, int | None]:
        """Returns a free slot of at least ``size`` bytes and, if its memory is new, the descriptor for the receiver."""
        if not self._free and self._on_their_way:
            self._take_back(wait=len(self._on_their_way) == self._window)
        number = len(self._on_their_way)
        if self._free:
            slot = self._free.pop()  # the one used last: its memory is the warmest
            if slot.size >= size:
                return slot, None
            number = slot.number
        descriptor = os.memfd_create("gpipe-message")
        os.ftruncate(descriptor, slot_bytes(size))
        return _Slot(number, descriptor), descriptor

    def _take_back(self, wait: bool) -> None:
        """Frees the slots of messages that the receiver has taken, which are the oldest.

        Args:
            wait: wait until at least one is taken.
        """
        try:
            taken = self._peer.recv(self._window, 0 if wait else socket.MSG_DONTWAIT)
        except OSError as error:
            if not wait:  # nothing yet; a receiver that has ended is noticed by the next wait
                return
            raise _lost(self._receiver, error) from None
        if wait and not taken:
            raise _lost(self._receiver)
        for _ in taken:
            self._free.append(self._on_their_way.popleft())


class Incoming:
    """Receives the messages of one direction from one worker.

    Args:
        peer: connected socket.
        sender: rank, for error messages.
        device: device on which the tensors are used.
    """

    def __init__(self, peer: socket.socket, sender: int, device: torch.device) -> None:
        self._peer, self._sender, self._device = peer, sender, device
        self._slots: dict[int, _Slot] = {}

    def receive(self, spec: BoundarySpec) -> Tensors:
        """Waits for the next message and copies it out: tensors on the device, each with memory of its own.

        Raises:
            RuntimeError: the sender has ended, or sends nothing for too long.
        """
        sent = self._next_slot().tensors(spec)
        tensors = tuple(
            tensor.to("cpu" if described.on_host else self._device, copy=True)
            for tensor, described in zip(sent, spec.tensors, strict=True)
        )
        with suppress(ConnectionError):  # the message is complete; the next receive reports the end of the sender
            self._peer.send(_BYTE)
        return tensors

    def _next_slot(self) -> _Slot:
        """Waits for the next announcement and returns its slot; a new slot's memory comes with it."""
        try:
            announced, memory, flags, _ = self._peer.recvmsg(
                _NUMBER.size, socket.CMSG_SPACE(_NUMBER.size), socket.MSG_WAITALL
            )
        except OSError as error:
            raise _lost(self._sender, error) from None
        if len(announced) < _NUMBER.size:
            raise _lost(self._sender)
        if flags & socket.MSG_CTRUNC:  # the kernel has dropped the descriptor
            raise OSError(f"no memory can be shared with rank {self._sender}: too many open files (ulimit -n)")
        (number,) = _NUMBER.unpack(announced)
        for _, _, content in memory:
            (descriptor,) = _NUMBER.unpack(content)
            self._slots[number] = _Slot(number, descriptor)
            os.close(descriptor)
        return self._slots[number]


def _lost(peer: int, error: OSError | None = None) -> RuntimeError:
    """Returns the error of a lost peer, in gloo's words, by which the launcher sees that another worker has ended."""
    if isinstance(error, BlockingIOError):
        return RuntimeError(f"process group, shared memory: rank {peer} neither sends nor takes a message any more")
    return RuntimeError(f"process group, shared memory: Connection closed by peer, rank {peer} ({error})")


def _patient(peer: socket.socket, seconds: float) -> socket.socket:
    """Sets the longest wait of a socket in the kernel, and returns the socket.

    Python's own timeout would cost two more system calls per message.
    """
    limit = struct.pack("@ll", int(seconds), 0)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return peer
