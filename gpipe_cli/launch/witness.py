"""Reports where a rank was that was killed, from a process beside it: no supervisor watches a rank of torchrun or srun.

rank ──starts──> witness          the rank writes its place into memory that both have
                                  its end, unless it is announced, makes the witness report that place
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpipe_cli.launch import report
from gpipe_cli.launch.places import open_place, unnamed_memory
from gpipe_cli.launch.stop import REQUESTS
from gpipe_cli.parent import python_command
from gpipe_cli.position import Position

LOOK_SECONDS = 0.1  # between two looks: the pipe alone may be held open by processes that the rank has started


class Witness:
    """Starts the witness of this process, and ends it with the `with` block.

    Attributes:
        where: this process's place, for the witness; for nobody where no process can be started.
    """

    def __init__(self, rank: int) -> None:
        memory = unnamed_memory(Position.SIZE)
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # no process is left
            self._process = subprocess.Popen(
                python_command(f"from gpipe_cli.launch.witness import main; main({os.getpid()}, {rank}, {memory})"),
                bufsize=0,
                stdin=subprocess.PIPE,
                pass_fds=[memory],
                start_new_session=True,  # a signal to the rank's process group does not reach it
            )
        self.where = open_place(memory, 0)

    def __enter__(self) -> Witness:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()
        if self._process is not None:
            self._process.wait()

    def write_to(self, directory: Path) -> None:
        """Sets the directory in which the report's file is to be left."""
        self._tell(str(directory))

    def dismiss(self) -> dict[str, Any]:
        """Ends the witness without a report; returns the place, for this process to tell its own end."""
        self._tell(None)
        return self.where.known()

    def _tell(self, message: str | None) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended
                self._process.stdin.write(json.dumps(message).encode() + b"\n")


def main(rank_process: int, rank: int, memory: int) -> None:
    """Waits for the end of process ``rank_process``; reports its place unless it has dismissed this process before."""
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    where, directory, received = open_place(memory, 0), None, b""
    while os.getppid() == rank_process or select.select([0], [], [], 0)[0]:
        if not select.select([0], [], [], LOOK_SECONDS)[0]:
            continue
        received += (news := os.read(0, 1 << 16))
        *lines, received = received.split(b"\n")
        for message in map(json.loads, lines):
            if message is None:
                return
            directory = Path(message)
        if not news:
            break
    failure = report.failure_without_report(rank, where.known())
    sys.stderr.write((report.publish(directory, failure) if directory else failure.text) + "\n")
