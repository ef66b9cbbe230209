"""Tests that no training step waits for ever under the rules of NCCL and CUDA, and that a wrong order stalls."""

from unittest.mock import patch

import pytest
from nccl_rules import Machine, Stalled
from nccl_runs import Run, drawn_run

from gpipe_cli.schedule.posting import post_ahead


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
