"""Finds the critical path of a step: the chain of instructions in which each had to wait for the one before it."""

from __future__ import annotations

from typing import NamedTuple

from .instruction import Message
from .simulate import Timeline


class Place(NamedTuple):
    """Names a span: ``timeline.spans[worker][number]``."""

    worker: int
    number: int


def critical_path(timeline: Timeline) -> list[Place]:
    """Returns the spans of the critical path, earliest first; empty for a timeline without spans.

    An instruction depends on the one before it on the same worker; a receive depends on its send, too. A receive was
    delayed by its send if the receiver spent more than half of the time from the send to the receive's end waiting;
    otherwise the message travelled while the receiver was computing, and delayed nothing.

    Args:
        timeline: measured on one clock, or of `simulate`.
    """
    ends = [(spans[-1].end, Place(worker, len(spans) - 1)) for worker, spans in enumerate(timeline.spans) if spans]
    if not ends:
        return []
    sends = _sends(timeline)
    here: Place | None = max(ends, key=lambda end: end[0])[1]
    path = []
    while here is not None:
        path.append(here)
        here = _delayed_by(timeline, here, sends)
    return path[::-1]


def _sends(timeline: Timeline) -> dict[Message, Place]:
    return {
        message: Place(worker, number)
        for worker, spans in enumerate(timeline.spans)
        for number, span in enumerate(spans)
        if (message := span.instruction.sent_message) is not None
    }


def _delayed_by(timeline: Timeline, place: Place, sends: dict[Message, Place]) -> Place | None:
    before = Place(place.worker, place.number - 1) if place.number > 0 else None
    receive = timeline.spans[place.worker][place.number]
    awaited = receive.instruction.awaited_message
    send = sends.get(awaited) if awaited is not None else None
    if send is None:
        return before
    sent_at = timeline.spans[send.worker][send.number].end
    waited = receive.end - receive.start
    return send if before is None or 2 * waited > receive.end - sent_at else before
