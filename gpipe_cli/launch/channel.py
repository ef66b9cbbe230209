"""Connects a worker and the command: JSON lines over one socket pair per worker, and the worker's place in memory."""

import contextlib
import json
import mmap
import os
import socket
import threading
from dataclasses import asdict
from typing import Any

from gpipe_cli.launch.report import Failure
from gpipe_cli.position import Position

STOP, LEAVE = b"s", b"l"  # the command's words to a worker: end the run in order; all have finished, exit
REPORT_SECONDS = 5.0  # that a failed worker waits for a command that does not read


def encode(message: dict[str, Any]) -> bytes:
    """Returns the message as one line. Scalars of numpy and torch become numbers, other foreign objects their `str`."""
    return json.dumps(message, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


class WorkerChannel:
    """Holds the worker's end. Sending never waits for the command and never fails when the command is gone."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._pending = bytearray()
        self._lock = threading.Lock()
        self._stop = False

    def send(self, message: dict[str, Any]) -> None:
        line = encode(message)
        with self._lock:
            self._pending += line
            self._flush()

    def _flush(self) -> None:
        try:
            while self._pending:
                del self._pending[: self._socket.send(self._pending)]
        except BlockingIOError:
            return  # the rest is sent with the next message
        except OSError:
            self._pending.clear()  # the command is gone; the zygote will end this process too

    def stop_requested(self) -> bool:
        """Returns whether the command has asked for the end of the run (it stays true)."""
        if not self._stop:
            try:
                self._stop = STOP in self._socket.recv(16)
            except OSError:  # nothing to read
                return False
        return self._stop

    def fail(self, failure: Failure) -> None:
        """Sends the report of the error that ends this worker, which may not reach a file on a full disk."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.settimeout(REPORT_SECONDS)
            self._socket.sendall(bytes(self._pending) + encode({"failed": asdict(failure)}))
            self._pending.clear()

    def finish(self, value: Any) -> None:
        """Sends the entry point's result, and returns when every worker has done so.

        Rank 0 serves the store, so it must not leave while another worker still needs it.

        Raises:
            TypeError: `value` cannot be written as JSON.
        """
        line = json.dumps({"finished": value}).encode() + b"\n"
        with self._lock:
            try:
                self._socket.settimeout(None)
                self._socket.sendall(bytes(self._pending) + line)
                while (received := self._socket.recv(16)) and LEAVE not in received:
                    pass
            except OSError:
                return


class CommandChannel:
    """Holds the command's end. Nothing in it waits."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(False)
        self._rest = b""

    def read(self) -> list[dict[str, Any]] | None:
        """Returns the messages that have arrived; None when the other side is gone."""
        try:
            received = self.connection.recv(2**18)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        if not received:
            return None
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def send(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the worker is gone
            self.connection.send(word)


def open_place(descriptor: int, rank: int) -> Position:
    """Returns the place of worker ``rank``, in the memory that the command reads; closes the descriptor."""
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    os.close(descriptor)
    return Position(memoryview(memory)[rank * Position.SIZE : (rank + 1) * Position.SIZE])


def unnamed_memory(name: str, size: int = 0) -> int:
    """Returns a descriptor that children can inherit."""
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, size)
    return descriptor
