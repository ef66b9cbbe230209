"""Starts a command that launches one of launch_jobs.py, and finds everything that it started."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import launch_jobs

import gpipe_cli

COMMAND = [sys.executable, str(Path(launch_jobs.__file__))]
GONE_SECONDS = 10.0  # what the launcher promises, whatever happens
START_UP_SECONDS = 30.0  # two torchruns on a busy machine
MARK = "GPIPE_TEST_MARK"
Found = TypeVar("Found")


def children_of(process: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
        return number


def wait_for(look: Callable[[], Found], seconds: float = START_UP_SECONDS) -> Found:
    """Returns the first result of ``look`` that counts as true."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


class Command:
    """Starts a command process; all its descendants carry its mark in the environment."""

    def __init__(self, run_dir: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        self.mark = uuid.uuid4().hex
        package_root = str(Path(gpipe_cli.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [package_root, str(run_dir.parent), os.environ.get("PYTHONPATH")]))
        self.run_dir = run_dir
        self.errors = run_dir / "stderr"
        self.process = subprocess.Popen(
            [*prefix, *COMMAND, *arguments],
            env={**os.environ, MARK: self.mark, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
            start_new_session=True,  # as a terminal's foreground job: its own process group, for Ctrl-C
        )
        self.ready: list[dict[str, Any]] = []

    def events(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout
        for line in self.process.stdout:
            yield json.loads(line)

    def wait_until_ready(self, workers: int) -> None:
        for event in self.events():
            if event["event"] == "ready":
                self.ready.append(event)
            if len(self.ready) == workers:
                time.sleep(0.1)  # from the announcement into the blocking call
                return
        raise AssertionError(f"the command ended before its workers were ready: {self.errors.read_text()}")

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> dict[Path, str]:
        """Returns the command lines of processes that carry this command's mark, by their folder in /proc.

        A zombie's environment is empty.
        """
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found[folder] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def end(self) -> tuple[int, str]:
        """Waits until the command and its descendants have ended, in the promised time; returns (exit code, stderr).

        Where the test has not waited for the workers, the time until they run counts extra.
        """
        allowed = GONE_SECONDS if self.ready else GONE_SECONDS + START_UP_SECONDS
        deadline = time.monotonic() + allowed
        code = self.process.wait(timeout=allowed)
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
        return code, self.errors.read_text()

    def clean_up(self) -> None:
        for folder in self.processes():
            with suppress(OSError):
                os.kill(int(folder.name), signal.SIGKILL)
        self.process.wait()
