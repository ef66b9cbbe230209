"""What makes the machine as busy as it is when a plan's other workers run."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from gpipe_cli.planner import neighbours


def test_they_work_while_the_body_runs_and_are_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*words: Any, **how: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*words, **how))
        return started[-1]

    monkeypatch.setattr(neighbours.subprocess, "Popen", start)
    with pytest.raises(ZeroDivisionError), neighbours.busy_neighbours(2, 1):
        assert [neighbour.poll() for neighbour in started] == [None, None]
        1 / 0  # noqa: B018  # the body fails
    assert all(neighbour.poll() is not None for neighbour in started)
