"""Tests that messages between workers have tags of their own, however many micro-batches and cells there are."""

from __future__ import annotations

from gpipe_cli.config import MESSAGE_TAGS, TAGS_PER_CELL
from gpipe_cli.pipeline.messages.process_group import DIRECTIONS, message_tag, spec_tag
from gpipe_cli.schedule.instruction import Message


def test_the_largest_step_that_the_settings_allow_keeps_its_tags_apart_and_below_those_of_the_exchange() -> None:
    K = 4096
    M = MESSAGE_TAGS // TAGS_PER_CELL // K
    numbers = (0, 1, 2047, 2048, 32767, 32768, M - 1)
    cells = (0, 1, 2047, 2048, K - 2)
    tags = [message_tag(Message(way, cell, m), K) for way in DIRECTIONS for cell in cells for m in numbers]
    tags += [spec_tag(cell) for cell in cells]
    assert len(set(tags)) == len(tags)
    assert min(tags) > 0 and max(tags) < MESSAGE_TAGS
