"""Tests table 4's shares of a step, in literal numbers."""

import pytest
from schedule_rules import scheduled

from gpipe_cli.metrics.breakdown import count_computations, even_durations, mean_breakdown, simulate_with
from gpipe_cli.schedule.instruction import InstructionLists, Op


def durations(lists: InstructionLists, forward: list[float], backward: list[float]) -> dict[tuple[Op, int], float]:
    like_forward = (Op.FORWARD, Op.RECOMPUTE)
    return {(op, cell): (forward if op in like_forward else backward)[cell] for op, cell in count_computations(lists)}


def test_even_durations_keep_the_work_and_level_the_workers() -> None:
    lists, placement = scheduled("gpipe", (0, 0, 1), 2, "never"), (0, 0, 1)
    own = durations(lists, [1.0, 2.0, 5.0], [2.0, 4.0, 10.0])
    even = even_durations(lists, placement, own)
    # 8 of forward on 2 workers: 4 each, which worker 0 divides between its two cells.
    assert [even[Op.FORWARD, cell] for cell in range(3)] == [2.0, 2.0, 4.0]
    assert sum(simulate_with(lists, placement, even).busy) == sum(simulate_with(lists, placement, own).busy) == 48


def test_the_shares_of_a_step_by_hand() -> None:
    """K=2, M=2, no recompute: cells of 1 and 3 forward, twice that backward; 2 of update; the step took 30.

    Busy are 2·(1+2) on worker 0 and 2·(3+6) on worker 1: 24. The schedule: worker 1 runs F F B B from 1 to 19, then
    worker 0's last backward: 21. With even cells of 2 and 4 it takes (M+K-1)·(2+4) = 18.
    """
    lists, placement = scheduled("gpipe", (0, 1), 2, "never"), (0, 1)
    cells = [{"forward": 2.0, "backward": 4.0}, {"forward": 6.0, "backward": 12.0}]
    shares, bubble = mean_breakdown(lists, placement, cells, updates=[1, 3], step_seconds=30)
    expected = {"computation": 24 / 60, "recomputation": 0, "weight_update": 4 / 60, "setup": (60 - 42 - 4) / 60}
    expected["bubble"] = (2 * 18 - 24) / 60  # a third of 36: (K-1)/(M+K-1)
    expected["load_imbalance"] = (2 * 21 - 2 * 18) / 60
    assert shares == pytest.approx(expected) and sum(shares.values()) == pytest.approx(1)
    assert bubble == pytest.approx(1 - 24 / 42)
