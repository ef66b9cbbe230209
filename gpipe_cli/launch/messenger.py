"""Sends bytes between the workers of one machine by sockets without a name, which no other process can open: no torch.

The command makes a pair of sockets for each worker, its mailbox: the worker alone inherits the end that receives, all
workers inherit the end that sends. A worker connects to another by putting one end of a new pair into its mailbox, with
a number that says what for.

There is no thread: a worker that waits for one message also takes what else arrives and sends what is left to send.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

LOCAL = "local"  # the backend of torch.distributed that uses mailboxes (local_group.py)
_HEADER = struct.Struct("<QqQ")  # channel, tag, bytes of the content
_MESSAGES = 0  # number of the connections that carry messages; others are given away
_LONGEST = 3600.0  # seconds of one wait in the kernel, which takes no years
_LETTER = struct.Struct("<ii")  # rank of the sender, number


def mailbox() -> tuple[socket.socket, socket.socket]:
    """Returns the receiving and the sending end of one worker's mailbox."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # letters of several workers arrive whole


class Address(NamedTuple):
    """Names messages that are received in the order in which they are sent.

    Attributes:
        peer: rank of the other worker.
        channel: number of the group, the same for all its workers.
    """

    peer: int
    channel: int
    tag: int


class Parcel:
    """Holds one message that is being sent or received.

    Attributes:
        rest: the part of the content that is still to be sent or filled.
        done: the system has taken the whole message, or the content is complete.
    """

    def __init__(self, address: Address, content: memoryview) -> None:
        self.address, self.rest, self.done = address, content, False


class Messenger:
    """Sends and receives the messages of this worker; one thread uses it at a time.

    Args:
        rank: number of this worker.
        receiving: descriptor, the end of its own mailbox that receives.
        sending: descriptors by rank, the ends of all mailboxes that send.
    """

    def __init__(self, rank: int, receiving: int, sending: list[int]) -> None:
        for descriptor in (receiving, *sending):
            os.set_inheritable(descriptor, False)
        self._rank, self._mailbox = rank, socket.socket(fileno=receiving)
        self._mailbox.setblocking(False)
        self._mailboxes = [socket.socket(fileno=descriptor) for descriptor in sending]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._mailbox, selectors.EVENT_READ)
        self._outgoing: dict[int, _Outgoing] = {}
        self._gone: set[int] = set()
        self._awaited: defaultdict[Address, deque[Parcel]] = defaultdict(deque)
        self._early: defaultdict[Address, deque[bytearray]] = defaultdict(deque)
        self._others: defaultdict[tuple[int, int], deque[socket.socket]] = defaultdict(deque)  # by peer and number

    def connect(self, peer: int, number: int) -> socket.socket:
        """Returns a connection of the caller's own to a worker, which takes it by `accept` with the same number, not 0.

        Raises:
            RuntimeError: the other worker has ended.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._mailboxes[peer], [_LETTER.pack(self._rank, number)], [theirs.fileno()])
        except OSError as error:
            raise _closed(peer) from error
        return ours

    def accept(self, peer: int, number: int, seconds: float) -> socket.socket:
        """Returns the oldest connection that a worker has made by `connect` and that was not taken; waits for it.

        Raises:
            RuntimeError: the other worker does nothing for so many seconds.
        """
        made = self._others[peer, number]
        self._wait_until(lambda: bool(made), peer, seconds)
        return made.popleft()

    def send(self, address: Address, content: memoryview) -> Parcel:
        """Starts to send; ``content`` must not change before the parcel is done.

        Raises:
            RuntimeError: the other worker has ended.
        """
        parcel = Parcel(address, content)
        try:
            outgoing = self._outgoing.get(address.peer) or self._begin_to_send(address.peer)
            outgoing.add(parcel)
            self._push(outgoing)
        except OSError as error:
            raise _closed(address.peer) from error
        return parcel

    def receive(self, address: Address, space: memoryview) -> Parcel:
        """Starts to receive a message of exactly as many bytes as ``space`` has.

        Raises:
            RuntimeError: a message of another size has arrived.
        """
        parcel = Parcel(address, space)
        if early := self._early.get(address):
            _fill(parcel, early.popleft())
        else:
            self._awaited[address].append(parcel)
        return parcel

    def wait(self, parcel: Parcel, seconds: float) -> None:
        """Waits until the parcel is done.

        Raises:
            RuntimeError: the other worker has ended, or does nothing for so many seconds.
        """
        self._wait_until(lambda: parcel.done, parcel.address.peer, seconds)

    def _wait_until(self, done: Callable[[], bool], peer: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if peer in self._gone:
                raise _closed(peer)
            if (left := deadline - time.monotonic()) < 0:
                raise RuntimeError(f"process group: nothing from or to rank {peer} for {seconds:g} s")
            for key, events in self._selector.select(min(left, _LONGEST)):
                self._handle(key.data, events)

    def _begin_to_send(self, peer: int) -> _Outgoing:
        outgoing = _Outgoing(peer, self.connect(peer, _MESSAGES))
        self._outgoing[peer] = outgoing
        self._selector.register(outgoing.connection, selectors.EVENT_READ, outgoing)  # to see its end
        return outgoing

    def _push(self, outgoing: _Outgoing) -> None:
        outgoing.push()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing.waiting else 0)
        if outgoing.events != events:
            outgoing.events = events
            self._selector.modify(outgoing.connection, events, outgoing)

    def _handle(self, connection: _Outgoing | _Incoming | None, events: int) -> None:
        if connection is None:
            self._accept()
            return
        try:
            if isinstance(connection, _Incoming):
                self._take(connection)
            elif events & selectors.EVENT_READ:  # nothing is ever sent back
                raise BrokenPipeError
            else:
                self._push(connection)
        except OSError:
            self._gone.add(connection.peer)
            self._selector.unregister(connection.connection)
            connection.connection.close()

    def _accept(self) -> None:
        """Takes the connections that other workers have put into the mailbox."""
        while True:
            try:
                letter, descriptors, _, _ = socket.recv_fds(self._mailbox, _LETTER.size, 1)
            except BlockingIOError:
                return
            if not letter:
                return
            peer, number = _LETTER.unpack(letter)
            if not descriptors:  # the kernel has dropped the descriptor
                raise OSError(f"no connection to worker {peer}: too many open files (ulimit -n)")
            os.set_inheritable(descriptors[0], False)
            connection = socket.socket(fileno=descriptors[0])
            if number == _MESSAGES:
                self._selector.register(connection, selectors.EVENT_READ, _Incoming(peer, connection))
            else:
                self._others[peer, number].append(connection)

    def _take(self, incoming: _Incoming) -> None:
        """Reads as much of one message as has arrived."""
        if incoming.address is None:
            if (header := incoming.read_header()) is None:
                return
            self._begin(incoming, *header)
        if incoming.rest:
            incoming.rest = incoming.rest[incoming.read(incoming.rest) :]
        if incoming.rest or incoming.address is None:
            return
        if incoming.parcel is not None:
            incoming.parcel.done = True
        elif awaited := self._awaited.get(incoming.address):
            _fill(awaited.popleft(), incoming.early)
        else:
            self._early[incoming.address].append(incoming.early)
        incoming.address = None

    def _begin(self, incoming: _Incoming, address: Address, size: int) -> None:
        """Chooses where the content of a message goes: to the parcel that awaits it, or to memory of its own."""
        incoming.address = address
        if awaited := self._awaited.get(address):
            incoming.parcel = awaited.popleft()
            incoming.rest = _of_size(incoming.parcel, size)
        else:
            incoming.parcel, incoming.early = None, bytearray(size)
            incoming.rest = memoryview(incoming.early)


class _Outgoing:
    """Holds the connection to one worker, and the messages that are still to be sent over it."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.peer, self.connection = peer, connection
        self.events = selectors.EVENT_READ
        self.waiting: deque[tuple[memoryview, Parcel]] = deque()  # rest of the header, parcel

    def add(self, parcel: Parcel) -> None:
        header = _HEADER.pack(parcel.address.channel, parcel.address.tag, len(parcel.rest))
        self.waiting.append((memoryview(header), parcel))

    def push(self) -> None:
        """Sends as much as the system takes."""
        while self.waiting:
            header, parcel = self.waiting[0]
            try:
                sent = self.connection.sendmsg([header, parcel.rest])
            except BlockingIOError:
                return
            parcel.rest = parcel.rest[max(0, sent - len(header)) :]
            if sent < len(header) or parcel.rest:
                self.waiting[0] = header[sent:], parcel
            else:
                parcel.done = True
                self.waiting.popleft()


class _Incoming:
    """Holds the connection from one worker, and the message that is arriving over it.

    Attributes:
        address: address of the arriving message; None between two messages.
        parcel: the parcel that awaits it; None if none did when it began to arrive: then ``early`` holds it.
        rest: the part of the content that is still to be filled.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.peer, self.connection = peer, connection
        self.address: Address | None = None
        self.parcel: Parcel | None = None
        self.early = bytearray()
        self.rest = memoryview(self.early)
        self._header = memoryview(bytearray(_HEADER.size))
        self._begun = 0  # bytes of the header

    def read_header(self) -> tuple[Address, int] | None:
        """Returns the address and the bytes of the next message; None while its header is incomplete."""
        self._begun += self.read(self._header[self._begun :])
        if self._begun < _HEADER.size:
            return None
        self._begun = 0
        channel, tag, size = _HEADER.unpack(self._header)
        return Address(self.peer, channel, tag), size

    def read(self, space: memoryview) -> int:
        """Returns how many bytes have been read into ``space``.

        Raises:
            OSError: the other worker has ended.
        """
        try:
            count = self.connection.recv_into(space)
        except BlockingIOError:
            return 0
        if not count:
            raise BrokenPipeError
        return count


def _fill(parcel: Parcel, content: bytearray) -> None:
    _of_size(parcel, len(content))[:] = content
    parcel.done = True


def _of_size(parcel: Parcel, size: int) -> memoryview:
    """Returns the parcel's space for a message of so many bytes."""
    if len(parcel.rest) != size:
        raise RuntimeError(
            f"a message of {size} bytes from rank {parcel.address.peer}, where {len(parcel.rest)} were expected"
        )
    return parcel.rest


def _closed(peer: int) -> RuntimeError:
    """Returns an error in gloo's words, by which the launcher recognises the consequence of another worker's end."""
    return RuntimeError(f"process group: Connection closed by peer, rank {peer}")
