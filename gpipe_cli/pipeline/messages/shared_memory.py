"""Implements `Transport` for workers of one machine, with memory that they share.

gloo sends over TCP even there: a message is copied four times and wakes two threads beside the two workers, and where
cores are the devices this is computing time. Here the sender copies a message into a slot of shared memory and
announces it by 16 bytes on a socket; the receiver copies it out and returns the slot by one byte.

The memory has no name (memfd) and travels as a descriptor over the socket, so nothing is left behind however the
processes end; the end of one process is seen by the other as the end of the socket.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from ...micro_batch import Tensors
from ...schedule.instruction import Message, send_window
from .boundary import BoundarySpec, unpack
from .process_group import ProcessGroupTransport, Wait, message_tag, routes, spec_tag

_TOKEN = struct.Struct("<qii")  # tag, slot, whether the slot's memory comes behind it
_CREDENTIALS = struct.Struct("3i")  # process, user, group: struct ucred of <sys/socket.h>
_BYTE = b"\0"
_NAME_BYTES = 64
_PATIENCE = 1800.0  # seconds, as a process group's: the end of a peer is seen at once, this is for one that hangs


def slot_bytes(message: int) -> int:
    """Returns the bytes of a slot for a message of this many bytes: whole pages."""
    return -(-message // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemoryTransport:
    """Sends messages through shared memory where both workers see the same memory, all others as ``other`` does.

    All workers of the pipeline make theirs at the same time.

    Args:
        other: for workers of other machines, for messages without content, and for descriptions.
        ranks, device, control: as in `connect_workers`.
    """

    blocks_device = False

    def __init__(
        self,
        other: ProcessGroupTransport,
        ranks: tuple[int, ...],
        device: torch.device,
        control: dist.ProcessGroup,
    ) -> None:
        self._other, self._ranks = other, ranks
        self._outgoing: dict[tuple[str, int], Outgoing] = {}  # by direction and receiver
        self._incoming: dict[tuple[str, int], Incoming] = {}  # by direction and sender
        self.send_spec, self.receive_spec, self.drain = other.send_spec, other.receive_spec, other.drain
        rank, window = dist.get_rank(), send_window(len(set(ranks)))
        for direction, sender, receiver in routes(ranks):
            if rank == sender and (peer := connect_sender(receiver, control, spec_tag(0), _PATIENCE)):
                self._outgoing[direction, receiver] = Outgoing(peer, receiver, window)
            elif rank == receiver and (peer := connect_receiver(sender, control, spec_tag(0), _PATIENCE)):
                self._incoming[direction, sender] = Incoming(peer, sender, device)

    @property
    def bytes_shared(self) -> int:
        return sum(channel.bytes_shared for channel in self._outgoing.values())

    def send(self, message: Message, tensors: Tensors, spec: BoundarySpec) -> None:
        channel = self._outgoing.get((message.direction, self._ranks[message.receiver]))
        if channel is None or not spec.size:
            self._other.send(message, tensors, spec)
        else:
            channel.send(tensors, spec, message_tag(message, len(self._ranks)))

    def post(self, message: Message, spec: BoundarySpec) -> Wait:
        channel = self._incoming.get((message.direction, self._ranks[message.sender]))
        if channel is None or not spec.size:
            return self._other.post(message, spec)
        tag = message_tag(message, len(self._ranks))
        return lambda separate: channel.receive(spec, tag)  # every tensor gets memory of its own


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
        """Returns views of the slot for the tensors of such a message; made once for messages that are alike."""
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

    @property
    def bytes_shared(self) -> int:
        """Returns the bytes of all slots."""
        return sum(slot.size for slot in (*self._free, *self._on_their_way))

    def send(self, tensors: Sequence[Tensor], spec: BoundarySpec, tag: int) -> None:
        """Copies a message into a slot and announces it to the receiver.

        Raises:
            RuntimeError: the receiver has ended, or the window is full and the receiver takes nothing for too long.
        """
        slot, new_memory = self._slot_for(spec.size)
        for place, tensor in zip(slot.tensors(spec), tensors, strict=True):
            place.copy_(tensor.detach() if tensor.requires_grad else tensor)
        try:
            self._peer.sendall(_TOKEN.pack(tag, slot.number, new_memory is not None))
            if new_memory is not None:
                socket.send_fds(self._peer, [_BYTE], [new_memory])
        except OSError as error:
            raise _lost(self._receiver, error) from None
        finally:
            if new_memory is not None:
                os.close(new_memory)
        self._on_their_way.append(slot)
        if not self._free:  # now, since before the next message it would delay the receiver
            self._take_back(wait=False)

    def _slot_for(self, size: int) -> tuple[_Slot, int | None]:
        """Returns a free slot that is large enough; for new memory also its descriptor, to be sent to the receiver."""
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
        """Frees the slots of messages that were taken: the oldest, as messages are taken in the order of sending."""
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
        device: where the tensors are used.
    """

    def __init__(self, peer: socket.socket, sender: int, device: torch.device) -> None:
        self._peer, self._sender, self._device = peer, sender, device
        self._slots: dict[int, _Slot] = {}

    def receive(self, spec: BoundarySpec, tag: int) -> Tensors:
        """Waits for the next message and copies it out: tensors on the device, each with memory of its own.

        Raises:
            RuntimeError: the sender has ended, or sends nothing for too long, or sends another message.
        """
        sent, number, is_new = self._next_token()
        if is_new:
            self._slots[number] = self._new_slot(number)
        if sent != tag:
            raise RuntimeError(f"rank {self._sender} sent message {sent} where {tag} is awaited")
        tensors = tuple(tensor.to(self._device, copy=True) for tensor in self._slots[number].tensors(spec))
        with suppress(ConnectionError):  # the message is complete; the next receive reports the end of the sender
            self._peer.send(_BYTE)
        return tensors

    def _next_token(self) -> tuple[int, int, bool]:
        try:
            token = self._peer.recv(_TOKEN.size, socket.MSG_WAITALL)
        except OSError as error:
            raise _lost(self._sender, error) from None
        if len(token) < _TOKEN.size:
            raise _lost(self._sender)
        sent, number, is_new = _TOKEN.unpack(token)
        return sent, number, bool(is_new)

    def _new_slot(self, number: int) -> _Slot:
        """Returns a slot of the memory whose descriptor follows the token."""
        try:
            byte, descriptors, _, _ = socket.recv_fds(self._peer, len(_BYTE), 1)
        except OSError as error:
            raise _lost(self._sender, error) from None
        if not byte:
            raise _lost(self._sender)
        if not descriptors:  # the kernel has dropped the descriptor
            raise OSError(f"no memory can be shared with rank {self._sender}: too many open files (ulimit -n)")
        slot = _Slot(number, descriptors[0])
        os.close(descriptors[0])
        return slot


def _lost(peer: int, error: OSError | None = None) -> RuntimeError:
    """Returns an error in gloo's words, by which the launcher recognises the consequence of another worker's end."""
    if isinstance(error, BlockingIOError):
        return RuntimeError(f"process group, shared memory: rank {peer} neither sends nor takes a message any more")
    return RuntimeError(f"process group, shared memory: Connection closed by peer, rank {peer} ({error})")


def connect_sender(receiver: int, control: dist.ProcessGroup, tag: int, patience: float) -> socket.socket | None:
    """Connects the sender's end of a channel; None where no memory can be shared, as between two machines.

    Args:
        receiver: rank.
        control: CPU group for connecting, with messages of this ``tag``.
        patience: the most seconds that a later wait may take.
    """
    name = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    dist.recv(name, receiver, group=control, tag=tag)
    peer = _reach(bytes(name.tolist()).rstrip(_BYTE))
    dist.send(torch.tensor([int(peer is not None)]), receiver, group=control, tag=tag)
    return None if peer is None else _patient(peer, patience)


def connect_receiver(sender: int, control: dist.ProcessGroup, tag: int, patience: float) -> socket.socket | None:
    """Connects the receiver's end of a channel; see `connect_sender`."""
    name = b"gpipe-" + secrets.token_hex(16).encode()
    listener = _listen(name)
    message = torch.tensor(list((name if listener else b"").ljust(_NAME_BYTES, _BYTE)), dtype=torch.uint8)
    answer = torch.zeros(1, dtype=torch.int64)
    dist.send(message, sender, group=control, tag=tag)
    dist.recv(answer, sender, group=control, tag=tag)
    if listener is None:
        return None
    with listener:
        return _patient(_accept(listener), patience) if answer.item() else None


def _accept(listener: socket.socket) -> socket.socket:
    """Returns the connection of a process of this user: any user's may connect to an abstract name."""
    while True:
        peer = listener.accept()[0]
        if _belongs_to_this_user(peer):
            return peer
        peer.close()


def _belongs_to_this_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _listen(name: bytes) -> socket.socket | None:
    """Returns a listener under an abstract name (no file, this machine only); None where there are no such names."""
    with ExitStack() as undo:
        try:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(_BYTE + name)
            listener.listen(1)
        except OSError:
            return None
        undo.pop_all()
        return listener


def _reach(name: bytes) -> socket.socket | None:
    """Returns a socket connected to that listener; None where there is none, or no memory can be shared."""
    if not name or not hasattr(os, "memfd_create"):  # a Python built for old systems has none
        return None
    with ExitStack() as undo:
        try:
            os.close(os.memfd_create("gpipe-trial"))
            peer = undo.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(_BYTE + name)
        except OSError:
            return None
        if not _belongs_to_this_user(peer):
            return None
        undo.pop_all()
        return peer


def _patient(peer: socket.socket, seconds: float) -> socket.socket:
    """Sets the longest wait in the kernel: Python's own timeout would cost two more system calls per message."""
    limit = struct.pack("@ll", int(seconds), 0)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return peer
