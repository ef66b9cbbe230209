"""Starts the processes of tests as forks of one that has imported torch: importing it anew takes 2 to 4 s each time.

`WarmPopen` takes the place of `subprocess.Popen`. It starts `python -m gpipe_cli…` and the launcher's zygotes by asking
a template, a process that has imported what workers import and waits for requests. Everything else starts as always.

    test ──asks──> template ──forks──> command ──asks──> its own template ──forks──> zygote ──forks──> workers

A process that was started so differs from a new one in nothing but the modules that are imported already: it is a child
of the one that asked for it, and has the descriptors, environment, directory and signals that it would have.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from gpipe_cli.cpu import GLOO_ON_ONE_MACHINE

IMPORTED = (
    *("torch", "torch.distributed", "torch._dynamo", "gpipe_cli.trainer.run", "hydra", "hydra.core.plugins"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "safetensors.torch"),
)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
MOST_DESCRIPTORS = 250  # that one message carries (the kernel's SCM_MAX_FD)
HIGH = 600  # descriptors from here on are nobody's
PLAIN_POPEN = subprocess.Popen
COMMAND_WITHOUT_TORCH = str(Path(__file__).with_name("cli_jobs.py"))


def can_be_warm(words: Sequence[Any]) -> bool:
    """Returns whether a template can run this command line."""
    if len(words) < 3 or words[0] != sys.executable:
        return False
    what, argument = str(words[1]), str(words[2])
    zygote = what == "-c" and "from gpipe_cli.launch.zygote import main" in argument
    return zygote or (what == "-m" and argument.startswith("gpipe_cli.")) or what == COMMAND_WITHOUT_TORCH


class WarmPopen(PLAIN_POPEN):  # type: ignore[type-arg]  # takes texts and bytes, as its base does
    """Starts a process as `subprocess.Popen`, by a template where that is possible.

    Attributes:
        pictures: whether warm processes draw pictures, which takes a third of a small run's time.
    """

    pictures = False

    def _execute_child(self, args: Any, *others: Any) -> None:
        names = list(inspect.signature(PLAIN_POPEN._execute_child).parameters)[2:]  # type: ignore[attr-defined]
        asked = dict(zip(names, others, strict=True))
        plain = isinstance(args, str) or asked["preexec_fn"] or asked["shell"] or not can_be_warm(args)
        if plain or (starter := template()) is None:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        standard = [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)]
        request = {
            "words": [str(word) for word in args[1:]],
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "directory": os.fspath(asked["cwd"] or Path.cwd()),
            "descriptors": [0, 1, 2, *asked["pass_fds"]],
            "new_session": asked["start_new_session"],
            "pictures": self.pictures,
        }
        self.pid = starter.start(request, [*standard, *asked["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in names if name.startswith(("p2c", "c2p", "err"))))  # type: ignore[attr-defined]


class Template:
    """Holds the connection to a template, and the processes that it starts."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Returns the id of a new process, a child of this one."""
        assert len(descriptors) <= MOST_DESCRIPTORS
        _adopt_orphans(True)
        try:
            text = json.dumps(request).encode()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            self.connection.sendmsg([len(text).to_bytes(8, "big")], rights)
            self.connection.sendall(text)
            return int.from_bytes(_exactly(self.connection, 8), "big")
        finally:
            _adopt_orphans(False)


@functools.cache
def template() -> Template | None:
    """Starts this process's template, a new interpreter; returns None where it cannot serve."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        environment = {**os.environ, **ONE_THREAD, **GLOO_ON_ONE_MACHINE}
        PLAIN_POPEN(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return Template(ours) if ours.recv(1) else None


def _adopt_orphans(wanted: bool) -> None:
    """Makes this process the parent of descendants whose own parent ends, which is how it gets its warm children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(wanted))


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Reads so many bytes."""
    text = b""
    while len(text) < size:
        more = connection.recv(size - len(text))
        assert more, "the template has ended"
        text += more
    return text


# ------------------------------------------------------------------------------------------------------ the template


def main(connection: socket.socket) -> NoReturn:
    """Imports what workers import, and answers requests until the process that asks is gone."""
    for name in IMPORTED:
        importlib.import_module(name)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.exit("an imported module has started threads, which do not live on in a fork")
    connection.sendall(b"!")
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    serve(connection, [entry for entry in sys.path[1:] if entry not in path])


def serve(connection: socket.socket, site: list[str]) -> NoReturn:
    """Answers requests.

    Args:
        site: the import path of a new interpreter, without what its command line and environment add.
    """
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a test is meant for the processes of the test
    while True:
        head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4 * MOST_DESCRIPTORS))
        if not head:
            os._exit(0)
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        request = json.loads(_exactly(connection, int.from_bytes(head, "big")))
        connection.sendall(_start(request, list(descriptors), site).to_bytes(8, "big"))
        for descriptor in descriptors:
            os.close(descriptor)


def _start(request: dict[str, Any], descriptors: list[int], site: list[str]) -> int:
    """Forks twice, so that the process that asked inherits the second child from the first; returns the second's id."""
    read_end, write_end = os.pipe()
    first = os.fork()
    if first == 0:
        first = os.getpid()
        second = os.fork()
        if second:
            os.write(write_end, second.to_bytes(8, "big"))
            os._exit(0)
        while os.getppid() == first:
            time.sleep(0.0005)
        _become(request, descriptors, site)
    os.close(write_end)
    second = int.from_bytes(os.read(read_end, 8), "big")
    os.close(read_end)
    os.waitpid(first, 0)
    return second


def _become(request: dict[str, Any], descriptors: list[int], site: list[str]) -> NoReturn:
    """Runs a command line as a new interpreter would."""
    _place(descriptors, request["descriptors"])
    if request["new_session"]:
        os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", os.isatty(1) or -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    extra = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    words = request["words"]
    first = {"-m": request["directory"], "-c": ""}.get(words[0], str(Path(words[0]).parent))
    sys.path[:] = [first, *extra, *site]
    sys.argv = words[1:] if words[0] == "-m" else words
    importlib.invalidate_caches()
    WarmPopen.pictures = request["pictures"]
    if not WarmPopen.pictures:
        importlib.import_module("matplotlib.figure").Figure.savefig = lambda *_, **__: None
    if words[0] != "-c":
        _take_template_along(site)
    _leave(_run(words))


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Gives the received descriptors the numbers that they are to have, and closes all others."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if number not in moved:
            with suppress(OSError):  # the listing's own
                os.close(number)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _take_template_along(site: list[str]) -> None:
    """Forks this process's own template, which starts the zygotes of a command."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        ours.close()
        serve(theirs, site)
    theirs.close()
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    globals()["template"] = functools.cache(lambda: Template(ours))


def _run(words: list[str]) -> int:
    """Runs a module, a text or a file, and returns the exit code."""
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if isinstance(stream, io.TextIOWrapper) and not stream.closed:
                stream.flush()
        except OSError:
            code = code or 120  # as the interpreter's
    os._exit(code)


if __name__ == "__main__":
    import warm_python

    warm_python.main(socket.socket(fileno=int(sys.argv[1])))
