"""Tests table 4's shares of a step, in literal numbers."""

import pytest
from schedule_rules import scheduled

from gpipe_cli.metrics.breakdown import mean_breakdown


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
