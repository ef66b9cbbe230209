"""Tests that no training step waits for ever under the rules of NCCL and CUDA, and that a wrong order stalls."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from nccl_rules import Machine, Rules, Stalled
from nccl_runs import Run, drawn_run

from gpipe_cli.schedule.posting import post_ahead

STRICTEST = Rules(buffer=0, occupies=True, hidden_syncs=1.0)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_run_stalls(first: int) -> None:
    for seed in range(first, first + 20):
        run, rules = drawn_run(seed)
        Machine(run.calls(), rules, seed).run()


def test_receives_posted_two_ahead_would_stall_on_such_a_device() -> None:
    ahead = patch("gpipe_cli.distributed.pipeline.post_when_sent", lambda lists: [post_ahead(own) for own in lists])
    with ahead:
        calls = Run("gpipe", (0, 1), 4, "never").calls()
    for seed in range(20):
        with pytest.raises(Stalled):
            Machine(calls, STRICTEST, seed).run()
