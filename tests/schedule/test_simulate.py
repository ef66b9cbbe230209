"""Tests the simulated clock against the closed formulas of the paper, and the pictures drawn from it."""

from __future__ import annotations

import pytest
from schedule_rules import scheduled

from gpipe_cli.schedule.instruction import Instruction
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.picture import draw_panels
from gpipe_cli.schedule.schedule import forward_only
from gpipe_cli.schedule.simulate import (
    Timeline,
    cost_durations,
    simulate,
    unit_durations,
)

SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (4, 4), (8, 32), (5, 3)]


def timeline(kind: str, K: int, M: int, remat: str = "never", backward: float = 1.0) -> Timeline:
    return simulate(scheduled(kind, range(K), M, remat), range(K), cost_durations([1.0] * K, backward))


def start_of(timeline: Timeline, text: str) -> float:
    wanted = Instruction.parse(text)
    return next(span.start for spans in timeline.spans for span in spans if span.instruction == wanted)


@pytest.mark.parametrize(("K", "M"), SIZES)
class TestClosedFormula:
    def test_zero_bubble_idles_for_a_third_of_it(self, K: int, M: int) -> None:
        line = timeline("zero_bubble", K, M, backward=2.0)
        if M >= K:
            assert line.span == 3 * M + (K - 1)
        assert line.span <= timeline("1f1b", K, M, backward=2.0).span


@pytest.mark.parametrize("M", [4, 5, 8])
@pytest.mark.parametrize(("kind", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 1), ("interleaved_1f1b", 3)])
def test_even_cells_have_the_bubble_of_the_formula(kind: str, v: int, M: int) -> None:
    placement = tuple(range(4)) * v
    line = simulate(scheduled(kind, placement, M, "never"), placement, cost_durations([1.0] * len(placement)))
    assert line.bubble == pytest.approx(3 / (v * M + 3))


class TestTime:
    def test_a_message_takes_its_latency(self) -> None:
        assert simulate(forward_only(range(3), 1), range(3), unit_durations, latency=0.5).span == 4

    def test_sends_and_receives_keep_their_worker_busy_for_the_host_s_time(self) -> None:
        # Worker 0: F0 to 1, send to 1.5, F1 to 2.5, send to 3. Worker 1: F0 from 1.5 to 2.5, F1 from 3.
        slow_host = simulate(forward_only((0, 1), 2), (0, 1), unit_durations, host=0.5)
        assert [start_of(slow_host, name) for name in ("F0.1", "F1.0", "F1.1")] == [1.5, 1.5, 3]
        # The message is there at 2.5, but the receive still takes its own time: 0.5 after F0, which ends at 11.5.
        early = simulate(forward_only((0, 1), 2), (0, 1), lambda i: 1.0 + 9.0 * i.cell, host=0.5)
        assert start_of(early, "F1.1") == pytest.approx(1.5 + 10 + 0.5)

    @pytest.mark.parametrize("kind", KINDS)
    def test_recompute_starts_before_the_gradient_arrives(self, kind: str) -> None:
        line = timeline(kind, 4, 4, "always")
        first = 3 if kind == "gpipe" else 0
        assert start_of(line, f"R0.{first}") < start_of(line, f"sg1.{first}")


class TestPicture:
    @pytest.mark.parametrize("placement", [(0, 1, 2), (0, 0, 1)], ids=str)
    def test_shows_forward_recompute_backward_and_idle_in_their_colours(self, placement: tuple[int, ...]) -> None:
        line = simulate(scheduled("gpipe", placement, 4, "always"), placement, unit_durations)
        drawn = str(draw_panels({"gpipe": line}))
        bars = {name: drawn.count(f'class="f-{name}" d="M') for name in ("blue", "pale", "orange", "idle")}
        assert all(bars.values()), bars
        assert 'aria-label="gpipe: K = 3, M = 4, bubble' in drawn
