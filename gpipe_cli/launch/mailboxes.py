"""Connects the workers of one machine by sockets without a name, which no other process can open. Imports no torch.

The command makes a pair of sockets for each worker, its mailbox: the worker alone inherits the end that receives, all
workers inherit the end that sends. A worker connects to another by putting one end of a new pair into its mailbox, with
a number that says what for.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

LOCAL = "local"  # the backend of torch.distributed that uses mailboxes (local_group.py)
_LETTER = struct.Struct("<ii")  # rank of the sender, number
# Each letter arrives whole, though several workers write to a mailbox. Only Linux has both an order and no small limit.
_LETTERS = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM


def mailbox() -> tuple[socket.socket, socket.socket]:
    """Returns the receiving and the sending end of one worker's mailbox."""
    return socket.socketpair(socket.AF_UNIX, _LETTERS)


class Mailboxes:
    """Holds the receiving end of a worker's own mailbox, and the sending ends of all.

    Args:
        receiving: descriptor.
        sending: descriptors, by rank.
    """

    def __init__(self, rank: int, receiving: int, sending: list[int]) -> None:
        for descriptor in (receiving, *sending):
            os.set_inheritable(descriptor, False)
        self._rank = rank
        self.own = socket.socket(fileno=receiving)
        self.own.setblocking(False)
        self._others = [socket.socket(fileno=descriptor) for descriptor in sending]

    def connect(self, rank: int, number: int) -> socket.socket:
        """Returns a new connection to a worker, which gets the other end from its `accept`, with this number.

        Raises:
            OSError: the worker has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._others[rank], [_LETTER.pack(self._rank, number)], [theirs.fileno()])
        return ours

    def accept(self) -> tuple[int, int, socket.socket] | None:
        """Returns a worker that has connected to this one: its rank, number and connection; None when none has.

        Raises:
            OSError: this process has no descriptor left for it.
        """
        try:
            letter, descriptors, _, _ = socket.recv_fds(self.own, _LETTER.size, 1)
        except BlockingIOError:
            return None
        if not letter:
            return None
        rank, number = _LETTER.unpack(letter)
        if not descriptors:  # the kernel has dropped the descriptor
            raise OSError(f"no connection to worker {rank}: too many open files (ulimit -n)")
        os.set_inheritable(descriptors[0], False)
        return rank, number, socket.socket(fileno=descriptors[0])
