"""Tests that another user of the machine finds no way into a job: no ports, no names, nothing unpickled."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from launch_command import Command

from gpipe_cli.launch.zygote import bootstrap

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for sockets in /proc")

NOBODY = 65534
INTERNET = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Runs a job of two workers and two replicas, which have used every way to talk to each other."""
    run_dir = tmp_path_factory.mktemp("job")
    command = Command(run_dir, "meet_and_wait", "4", str(run_dir), 'preload=["torch"]')
    try:
        command.wait_until_ready(4)
        yield command
    finally:
        command.clean_up()


def sockets_of(folder: Path) -> set[str]:
    """Returns the inodes of a process's sockets."""
    links = []
    with suppress(OSError):  # the process, or one of its descriptors, is gone
        for entry in (folder / "fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(str(entry.readlink()))
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}


def table(name: str) -> list[list[str]]:
    """Returns the rows of a table of the kernel's sockets."""
    path = Path("/proc/net") / name
    return [row.split() for row in path.read_text().splitlines()[1:]] if path.exists() else []


@contextmanager
def as_another_user(act: Callable[[], object]) -> Iterator[str]:
    """Runs ``act`` in a process of another user, which lives as long as the block, and yields what came of it."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            kept = act()
            theirs.sendall(b"done")
        except BaseException as error:
            theirs.sendall(type(error).__name__.encode())
        signal.pause()
        del kept
    with ours, theirs:
        yield ours.recv(100).decode()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_no_process_of_a_job_has_a_socket_of_the_internet(running: Command) -> None:
    processes = running.processes()
    assert len(processes) == 6  # the command, the zygote, four workers
    ours = set().union(*map(sockets_of, processes))
    assert len(ours) > 10
    assert not ours & {row[9] for name in INTERNET for row in table(name)}


def test_no_socket_of_a_job_has_a_name(running: Command) -> None:
    ours = set().union(*map(sockets_of, running.processes()))
    rows = {row[6]: row[7:] for row in table("unix")}
    assert len(ours & rows.keys()) > 10
    assert not any(rows[inode] for inode in ours & rows.keys())


def test_no_file_of_the_run_directory_says_how_to_join(running: Command) -> None:
    folder = running.run_dir / "workers"
    assert {path.name for path in folder.iterdir()} == {"starter.log", *(f"rank_{rank}.log" for rank in range(4))}


@as_root
def test_another_user_opens_no_descriptor_of_a_job(running: Command) -> None:
    folders = [folder / "fd" for folder in running.processes()]
    memory = [entry for folder in folders for entry in folder.iterdir() if "gpipe-store" in str(entry.readlink())]
    assert len(memory) == 4  # the store of each worker
    for forbidden in (lambda: memory[0].open("r+b"), lambda: [list(folder.iterdir()) for folder in folders]):
        with as_another_user(forbidden) as outcome:
            assert outcome == "PermissionError"


def test_a_pickle_from_another_worker_is_an_error_and_runs_nothing(tmp_path: Path) -> None:
    command = Command(tmp_path, "send_pickle", "2", str(tmp_path), 'preload=["torch"]')
    code, said = command.end()
    assert code == 1
    assert "DecodeError" in said
    assert not (tmp_path / "code has run").exists()


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("open('code has run', 'w')")
    done = subprocess.run(bootstrap("run_zygote"), cwd=tmp_path, input=b"{}", capture_output=True)
    assert b"control" in done.stderr  # of the job, which is empty here
    assert not (tmp_path / "code has run").exists()
