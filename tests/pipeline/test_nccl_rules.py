"""Tests that no training step waits for ever under the rules of NCCL and CUDA, and that a wrong order stalls."""

import random
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
from nccl_rules import Call, Machine, Stalled
from nccl_runs import Run, drawn_run
from schedule_rules import scheduled

from gpipe_cli.config import ROUND_ROBIN
from gpipe_cli.schedule.early import post_early
from gpipe_cli.schedule.instruction import COMPUTE, InstructionLists, Message
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.posting import Posts, post_ahead
from gpipe_cli.schedule.schedule import REMAT, forward_only


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_run_stalls(first: int) -> None:
    for seed in range(first, first + 20):
        calls = drawn_run(seed).calls()
        for pairs in (True, False):
            Machine(calls, pairs).run()


@pytest.mark.parametrize("pairs", [True, False])
def test_receives_posted_two_ahead_would_stall_on_such_a_device(pairs: bool) -> None:
    with patch("gpipe_cli.distributed.pipeline.post_early", lambda lists: [post_ahead(own) for own in lists]):
        calls = Run("gpipe", (0, 1), 4, "never").calls()
    with pytest.raises(Stalled):
        Machine(calls, pairs).run()


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_no_list_with_receives_posted_early_stalls(first: int) -> None:
    for seed in range(first, first + 40):
        draw = random.Random(seed)
        kind, workers, M = draw.choice(list(KINDS)), draw.randint(2, 9), draw.randint(1, 20)
        placement = tuple(range(workers)) * (draw.randint(1, 3) if kind in ROUND_ROBIN else 1)
        keep = draw.choice([*REMAT, draw.randint(0, M), [draw.randint(0, M) for _ in placement]])
        lists = scheduled(kind, placement, M, keep) if draw.random() < 0.9 else forward_only(placement, M)
        for pairs in (True, False):
            Machine(programs(lists, placement, post_early(lists)), pairs).run()


def programs(lists: InstructionLists, placement: Sequence[int], posts: Sequence[Posts]) -> list[list[Call]]:
    """Returns the calls of every worker: first those that connect them, then a step."""

    def transfer(kind: str, message: Message, step: str) -> Call:
        ends = placement[message.sender], placement[message.receiver]
        return Call(kind, (step, message), (min(ends), max(ends)), f"{message.direction} {ends[0] < ends[1]}")

    def calls(worker: int) -> Iterator[Call]:
        for message in first:
            if worker in (sender := placement[message.sender], placement[message.receiver]):
                yield transfer("send" if worker == sender else "receive", message, "connects")
        for position, i in enumerate(lists[worker]):
            for receive in posts[worker].get(position, ()):
                assert receive.awaited_message is not None
                yield transfer("receive", receive.awaited_message, "step")
            if i.sent_message is not None:
                yield transfer("send", i.sent_message, "step")
            elif i.op in COMPUTE:
                yield Call("compute", i)

    sent = (i.sent_message for each in lists for i in each)
    first = {(m.direction, placement[m.sender], placement[m.receiver]): m for m in sent if m is not None}.values()
    return [list(calls(worker)) for worker in range(len(lists))]
