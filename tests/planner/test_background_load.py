"""Tests the processes that keep other cores busy while layers are timed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from gpipe_cli.planner.measure.background_load import background_load

DEADLINE = 30.0  # seconds


def status(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return []


def test_other_processes_compute_while_the_body_runs_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **options: started.append(popen(*a, **options)) or started[-1])
    with pytest.raises(ZeroDivisionError), background_load(processes=2, threads=1):
        end = time.monotonic() + DEADLINE
        ticks_per_second = os.sysconf("SC_CLK_TCK")
        while not all(int(status(process.pid)[11]) > 0.05 * ticks_per_second for process in started):
            assert time.monotonic() < end
            time.sleep(0.05)
        1 / 0  # noqa: B018  # the body fails
    assert [process.returncode for process in started] == [-9, -9]
