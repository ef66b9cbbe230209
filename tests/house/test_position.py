"""Tests a worker's place in memory: what is written is read by every view of the memory."""

from __future__ import annotations

import pytest

from gpipe_cli.position import Position


def test_a_place_is_read_where_its_memory_is_shared() -> None:
    memory = bytearray(Position.SIZE)
    worker, command = Position(memory), Position(memory)
    assert command.known() == {}
    worker.step = 3
    worker.enter(0, 2, "forward")
    worker.layer = "encoder.0" * 100
    known = command.known()
    assert str(known.pop("layer")).startswith("encoder.0encoder.0")  # cut, and the fields behind it are whole
    assert known == {"step": 3, "cell": 0, "micro_batch": 2, "instruction": "forward"}
    worker.enter(None, None, "größere Arbeit")
    assert command.known() == {"step": 3, "instruction": "größere Arbeit"}


def test_work_is_named_as_long_as_it_lasts_and_in_the_report_of_its_failure() -> None:
    where = Position()
    with where.doing("evaluating"), where.doing("reading"):
        assert where.instruction == "reading"
    assert where.instruction is None
    with pytest.raises(ValueError), where.doing("reading"):
        raise ValueError
    assert where.instruction == "reading"
