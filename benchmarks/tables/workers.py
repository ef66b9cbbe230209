"""Starts worker processes and commands for a measurement, and describes the machine. Imports no torch."""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpipe_cli
from gpipe_cli.cpu import processor_name, usable_cores
from gpipe_cli.launch.supervisor import Job, launch

LINES_KEPT = 30  # of a failed command's output


def run_workers(entry: str, workers: int, config: Mapping[str, Any]) -> Any:
    """Runs ``entry(context, config)`` on so many processes with one thread each; returns rank 0's result.

    The module of ``entry`` is imported once, before the processes are forked.

    Raises:
        WorkerFailed, ConfigurationError: a worker raised an exception.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-bench-") as directory:
        job = Job(Path(directory), workers, entry, dict(config), preload=("torch", entry.partition(":")[0]))
        return launch(job, lambda event: None)


class CommandFailed(RuntimeError):
    """Raised when a command ends with an error; the message has its last lines."""


def environment() -> dict[str, str]:
    """Returns the environment in which commands are those of this very package, installed or not."""
    places = [str(Path(gpipe_cli.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}


def run_command(command: str, words: Sequence[str], folder: Path | None = None, codes: Sequence[int] = (0,)) -> str:
    """Runs a command and returns what it prints on standard output.

    Args:
        command: its name, "gpipe-train"; it is run as a module, which needs no installation.
        folder: the current directory of the command; None: that of this process.
        codes: exit codes that are no failure.

    Raises:
        CommandFailed: the command failed.
    """
    line = [sys.executable, "-m", f"gpipe_cli.commands.{command.removeprefix('gpipe-')}", *words]
    done = subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LINES_KEPT:])
        raise CommandFailed(f"{command} {' '.join(words)} ended with {done.returncode}:\n{said}")
    return done.stdout


def machine() -> dict[str, Any]:
    """Returns the processor, its cores, the load and the versions of Python and torch."""
    facts = {"processor": processor_name(), "cores": usable_cores(), "load": round(os.getloadavg()[0], 2)}
    return facts | {"python": platform.python_version(), "torch": version("torch")}


def machine_line() -> str:
    """Returns `machine` as one line of text."""
    line = "{processor}, {cores} cores, load {load} at the start; Python {python}, torch {torch}"
    return line.format(**machine())
