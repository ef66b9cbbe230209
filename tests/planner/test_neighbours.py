"""What makes the machine as busy as it is when a plan's other workers run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpipe_cli.planner.measure.neighbours import Neighbours


@pytest.fixture
def neighbours() -> Iterator[Neighbours]:
    some = Neighbours(count=2, threads=1)
    yield some
    some.dismiss()


def processor_seconds(neighbours: Neighbours) -> float:
    """Of all of them so far."""
    ticks = 0
    for process in neighbours._processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system
    return ticks / os.sysconf("SC_CLK_TCK")


def test_they_work_while_the_body_runs_and_rest_after_it(neighbours: Neighbours) -> None:
    with neighbours.busy():
        before = processor_seconds(neighbours)
        time.sleep(1.0)
        assert processor_seconds(neighbours) - before > 0.1
    before = processor_seconds(neighbours)
    time.sleep(0.5)
    assert processor_seconds(neighbours) - before < 0.1


def test_the_same_ones_work_again_after_a_body_that_failed(neighbours: Neighbours) -> None:
    with pytest.raises(ZeroDivisionError), neighbours.busy():
        1 / 0  # noqa: B018  # the body fails
    first = [process.pid for process in neighbours._processes]
    with neighbours.busy():
        assert [process.pid for process in neighbours._processes] == first
        assert all(process.poll() is None for process in neighbours._processes)


def test_they_end_with_the_object_that_holds_them() -> None:
    some = Neighbours(count=1, threads=1)
    with some.busy():
        (process,) = some._processes
    del some
    assert process.poll() is not None


def test_they_end_by_themselves_when_nobody_can_tell_them_anything_any_more(neighbours: Neighbours) -> None:
    with neighbours.busy():
        pass
    for process in neighbours._processes:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=10) == 0


def test_a_neighbour_that_has_died_is_named_by_its_exit_code(neighbours: Neighbours) -> None:
    with neighbours.busy():
        pass
    neighbours._processes[0].kill()
    neighbours._processes[0].wait()
    with pytest.raises(RuntimeError, match="exit code -9"), neighbours.busy():
        pass


def test_none_are_started_where_none_are_wanted() -> None:
    none = Neighbours(count=0, threads=1)
    with none.busy():
        assert not none._processes
