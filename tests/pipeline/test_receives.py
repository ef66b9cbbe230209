"""Receives are posted ahead, and a device that waits for all of them never waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpipe_cli.pipeline.receives import RECEIVES_AHEAD, ReceivesAhead
from gpipe_cli.schedule.instruction import COMPUTE, Instruction, Op
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.schedule import forward_only, schedule

Event = tuple[str, object]  # ("post" or "send", message), or ("compute", instruction)


def events(instructions: Sequence[Instruction], after_sends: bool) -> list[Event]:
    """Returns what the worker starts, in order, as the engine executes its list."""
    found: list[Event] = []

    def post(instruction: Instruction) -> bool:
        found.append(("post", instruction.awaited_message))
        return True

    receives = ReceivesAhead(instructions, post, after_sends)
    receives.post_ahead(Op.RECEIVE_ACTIVATION)
    for i in instructions:
        if i.op in COMPUTE:
            found.append(("compute", i))
        elif (message := i.sent_message) is not None:
            found.append(("send", message))
            receives.has_sent()
        else:
            if not receives.take(i):
                post(i)
            receives.post_ahead(i.op)
    assert not receives
    return found


def gets_stuck(workers: Sequence[Sequence[Event]], sends_too: bool = False) -> bool:
    """Returns whether some worker waits for ever, if every computation first waits for all transfers of its device.

    A receive lasts until its message was sent; with ``sends_too`` a send lasts until its receive was posted, as with
    NCCL and messages too large for its buffers.
    """
    places, under_way = [0] * len(workers), [set[Event]() for _ in workers]
    started: set[Event] = set()
    other = {"post": "send", "send": "post"}
    moved = True
    while moved:
        moved = False
        for worker, own in enumerate(workers):
            while places[worker] < len(own):
                what, message = own[places[worker]]
                if what == "compute" and any((other[kind], m) not in started for kind, m in under_way[worker]):
                    break
                if what != "compute":
                    started.add((what, message))
                if what == "post" or (what == "send" and sends_too):
                    under_way[worker].add((what, message))
                places[worker] += 1
                moved = True
    return any(place < len(own) for place, own in zip(places, workers, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("W", [2, 3, 4, 8])
def test_a_device_that_waits_for_all_its_transfers_goes_on(kind: str, W: int) -> None:
    placement = tuple(range(W)) * (2 if kind == "interleaved_1f1b" else 1)
    for M in (1, 2, 3, 5, 8, 16):
        for remat in ("never", "always", "except_last"):
            started = [events(instructions, after_sends=True) for instructions in schedule(kind, placement, M, remat)]
            assert not gets_stuck(started), (M, remat)
            assert kind == "interleaved_1f1b" or not gets_stuck(started, sends_too=True), (M, remat)


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 2, 3), (0, 1, 0, 1)])
def test_a_device_that_waits_in_a_forward_only_step_goes_on(placement: tuple[int, ...]) -> None:
    for M in (1, 2, 5, 8):
        assert not gets_stuck([events(instructions, after_sends=True) for instructions in forward_only(placement, M)])


def test_receives_posted_before_earlier_sends_block_such_a_device() -> None:
    lists = schedule("gpipe", (0, 1), 4, "never")
    assert gets_stuck([events(instructions, after_sends=False) for instructions in lists])


def test_two_receives_of_each_kind_are_posted_ahead() -> None:
    middle = schedule("gpipe", (0, 1, 2), 4, "never")[1]
    kinds = [
        f"{what} {message[0]} {message[2]}" if isinstance(message, tuple) else str(message)
        for what, message in events(middle, after_sends=False)
    ]
    assert kinds[:4] == ["post activation 0", "post activation 1", "post activation 2", "F1.0"]
    posted = kinds.index("send activation 0") + 1
    assert kinds[posted : posted + RECEIVES_AHEAD] == ["post gradient 3", "post gradient 2"]
