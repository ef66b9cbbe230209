"""Sends bytes between the workers of one machine, through what has no name and no other process can open: no torch.

The command makes a pair of sockets for each worker, its mailbox: the worker alone inherits the end that receives, all
workers inherit the end that sends. A letter in a mailbox says whose it is, and holds a short message, or the descriptor
of memory (memfd) with a long one. So a sender waits only for room in a mailbox, takes its own letters meanwhile, and
needs no thread; and the end of a worker is seen as the end of its mailbox.
"""

import os
import select
import socket
import struct
import time
from collections import defaultdict, deque
from typing import NamedTuple

LOCAL = "local"  # the backend of torch.distributed that uses mailboxes (local_group.py)
_HEAD = struct.Struct("<iQq")  # of a letter: rank of the sender, channel, tag
_SHORT = 16_384  # bytes of a message in its letter
_CONNECTIONS = 2**64 - 1  # channel of the sockets that are given away; the group's are checksums of 32 bits
_LONGEST = 3600.0  # seconds of one wait in the kernel, which takes no years


def mailbox() -> tuple[socket.socket, socket.socket]:
    """Makes one worker's mailbox; returns its receiving and its sending end."""
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


_Letter = tuple[bytes, list[int]]  # a short message; or the descriptor of a long one, or of a connection


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
            os.set_blocking(descriptor, False)
        self._rank, self._mailbox = rank, socket.socket(fileno=receiving)
        self._mailboxes = [socket.socket(fileno=descriptor) for descriptor in sending]
        self._arrived: defaultdict[Address, deque[_Letter]] = defaultdict(deque)

    def send(self, address: Address, content: memoryview, seconds: float) -> None:
        """Sends a message.

        Raises:
            RuntimeError: the other worker has ended, or takes nothing for so many seconds.
        """
        if len(content) <= _SHORT:
            self._post(address, content, [], seconds)
            return
        with os.fdopen(os.memfd_create("gpipe-message"), "w+b") as memory:
            memory.write(content)
            memory.seek(0)
            self._post(address, b"", [memory.fileno()], seconds)

    def receive(self, address: Address, space: memoryview, seconds: float) -> None:
        """Waits for the next message of exactly as many bytes as ``space`` has, and copies it there.

        Raises:
            RuntimeError: the other worker has ended or sends nothing for so many seconds, or the size is another.
        """
        content, descriptors = self._next(address, seconds)
        size = len(content) if not descriptors else os.fstat(descriptors[0]).st_size
        if size != len(space):
            raise RuntimeError(f"a message of {size} bytes from rank {address.peer}, where {len(space)} were expected")
        if not descriptors:
            space[:] = content
            return
        with os.fdopen(descriptors[0], "rb") as memory:
            memory.readinto(space)

    def connect(self, peer: int, number: int, seconds: float) -> socket.socket:
        """Returns a connection of the caller's own to a worker, which takes it by `accept` with the same number.

        Raises:
            RuntimeError: as of `send`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._post(Address(peer, _CONNECTIONS, number), b"", [theirs.fileno()], seconds)
        return ours

    def accept(self, peer: int, number: int, seconds: float) -> socket.socket:
        """Returns the oldest connection of a worker's `connect` with this number; waits for it.

        Raises:
            RuntimeError: as of `receive`.
        """
        return socket.socket(fileno=self._next(Address(peer, _CONNECTIONS, number), seconds)[1][0])

    def _post(self, address: Address, content: bytes | memoryview, descriptors: list[int], seconds: float) -> None:
        """Puts a letter into the other worker's mailbox, with copies of the descriptors; waits while it is full."""
        head, deadline = _HEAD.pack(self._rank, address.channel, address.tag), time.monotonic() + seconds
        while True:
            try:
                socket.send_fds(self._mailboxes[address.peer], [head, content], descriptors)
                return
            except BlockingIOError:  # it is full
                self._wait(address.peer, select.POLLOUT, deadline)
            except ConnectionError as error:
                raise _closed(address.peer) from error

    def _next(self, address: Address, seconds: float) -> _Letter:
        """Returns the oldest letter that has come from an address; waits for it."""
        arrived, deadline = self._arrived[address], time.monotonic() + seconds
        while not arrived:
            self._wait(address.peer, 0, deadline)
        return arrived.popleft()

    def _wait(self, peer: int, events: int, deadline: float) -> None:
        """Waits once: until own letters have come, which it takes, or ``events`` of the other's mailbox.

        Raises:
            RuntimeError: the deadline is over, or the other worker has ended.
        """
        left = deadline - time.monotonic()
        if left < 0:
            raise RuntimeError(f"process group: nothing from or to rank {peer} in time")
        poll = select.poll()
        poll.register(self._mailbox, select.POLLIN)
        poll.register(self._mailboxes[peer], events)
        ready = dict(poll.poll(1000 * min(left, _LONGEST)))
        if ready.get(self._mailbox.fileno()):
            self._take_letters()
        elif ready.get(self._mailboxes[peer].fileno(), 0) & select.POLLHUP:
            raise _closed(peer)

    def _take_letters(self) -> None:
        """Moves all letters from the own mailbox to `_arrived`."""
        while True:
            try:
                letter, descriptors, flags, _ = socket.recv_fds(self._mailbox, _HEAD.size + _SHORT, 1)
            except BlockingIOError:
                return
            address = Address(*_HEAD.unpack_from(letter))
            if flags & socket.MSG_CTRUNC:  # the kernel has dropped a descriptor
                raise OSError(f"no message from rank {address.peer}: too many open files (ulimit -n)")
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            self._arrived[address].append((letter[_HEAD.size :], descriptors))


def _closed(peer: int) -> RuntimeError:
    """Returns an error in gloo's words, by which the launcher recognises the consequence of another worker's end."""
    return RuntimeError(f"process group: Connection closed by peer, rank {peer}")
