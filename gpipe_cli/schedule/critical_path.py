"""Finds the critical path of a step: the chain of instructions in which each waited for the one before it."""

from __future__ import annotations

from typing import NamedTuple

from .instruction import Message
from .simulate import Timeline


class Place(NamedTuple):
    """Identifies a span: ``timeline.spans[worker][number]``."""

    worker: int
    number: int


def critical_path(timeline: Timeline) -> list[Place]:
    """Returns the chain of spans that leads to the one that ends last.

    An instruction depends on the one before it on the same worker; a receive depends on its send, too. The path goes
    from a receive to its send if the receiver spent more than half of the time since the send waiting. A message
    that travelled while the receiver was computing delayed nothing.

    Args:
        timeline: measured on one clock, or of `simulate`.

    Returns:
        The spans of the path, earliest first; empty for a timeline without spans.
    """
    ends = [(spans[-1].end, Place(worker, len(spans) - 1)) for worker, spans in enumerate(timeline.spans) if spans]
    if not ends:
        return []
    sends = _sends(timeline)
    # If several end at the same time, the first worker's is taken.
    here: Place | None = max(ends, key=lambda end: end[0])[1]
    path = []
    while here is not None:
        path.append(here)
        here = _held_up_by(timeline, here, sends)
    return path[::-1]


def _sends(timeline: Timeline) -> dict[Message, Place]:
    return {
        message: Place(worker, number)
        for worker, spans in enumerate(timeline.spans)
        for number, span in enumerate(spans)
        if (message := span.instruction.sent_message) is not None
    }


def _held_up_by(timeline: Timeline, place: Place, sends: dict[Message, Place]) -> Place | None:
    before = Place(place.worker, place.number - 1) if place.number > 0 else None
    receive = timeline.spans[place.worker][place.number]
    awaited = receive.instruction.awaited_message
    send = sends.get(awaited) if awaited is not None else None
    if send is None:
        return before
    sent_at = timeline.spans[send.worker][send.number].end
    waited = receive.end - receive.start
    return send if before is None or 2 * waited > receive.end - sent_at else before
