"""Tests that schedules are the paper's and keep the rules of a pipeline, and the simulated clock by closed formulas."""

import sys
from collections.abc import Sequence
from itertools import product
from textwrap import dedent

import pytest
from processes import run, succeeded
from schedule_rules import Policy, check_rules, scheduled

from gpipe_cli.benchmarks.tables.throughput import cost_durations
from gpipe_cli.config import ROUND_ROBIN
from gpipe_cli.schedule.early import post_early
from gpipe_cli.schedule.instruction import Instruction
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.picture import draw_panels, draw_text
from gpipe_cli.schedule.posting import post_when_sent
from gpipe_cli.schedule.schedule import REMAT, forward_only, most_kept
from gpipe_cli.schedule.simulate import Timeline, simulate, unit_durations

PLACEMENTS = [(0,), (0, 0, 0), (0, 1), (0, 1, 2, 3), (0, 0, 1), (0, 1, 1, 1, 2), (0, 0, 1, 1, 2, 2)]
ROUND = [(0,), (0, 0, 0), (0, 1), (0, 1, 0, 1), (0, 1, 2) * 3, (0, 1, 2, 3, 4) * 2]
SERVED = [(kind, placement) for kind in KINDS for placement in (ROUND if kind in ROUND_ROBIN else PLACEMENTS)]


def printed(kind: str, placement: Sequence[int], M: int, policy: Policy) -> list[str]:
    return [" ".join(map(str, instructions)) for instructions in scheduled(kind, placement, M, policy)]


GRIDS: dict[str, tuple[str, Sequence[int], int, Policy, str]] = {
    "gpipe is the paper's figure 2c": ("gpipe", range(4), 4, "never", """
        worker 0 | F0 F1 F2 F3  .  .  .  .  .  . B3 B2 B1 B0
        worker 1 |  . F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0  .
        worker 2 |  .  . F0 F1 F2 F3  .  . B3 B2 B1 B0  .  .
        worker 3 |  .  .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .  .
    """),
    "except_last keeps the graph of the micro-batch that comes back first": ("gpipe", range(3), 4, "except_last", """
        worker 0 | F0 F1 F2 F3  .  .  .  . B3 R2 B2 R1 B1 R0 B0
        worker 1 |  . F0 F1 F2 F3  .  . B3 R2 B2 R1 B1 R0 B0  .
        worker 2 |  .  . F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0  .  .
    """),
    "1f1b": ("1f1b", range(3), 4, "never", """
        worker 0 | F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        worker 1 |  . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        worker 2 |  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
    """),
    "interleaved_1f1b: a group goes through the first cells first": ("interleaved_1f1b", (0, 1, 0, 1), 4, "never", """
        worker 0 cell 0 | F0 F1       F2    F3       B0    B1  .     .    B2 B3
        worker 0 cell 2 |       F0 F1    B0    B1 F2    F3     . B2  . B3
        worker 1 cell 1 |  . F0 F1             F2 B0 F3 B1             B2 B3  .
        worker 1 cell 3 |  .       F0 B0 F1 B1             F2 B2 F3 B3        .
    """),
    "breadth_first: all micro-batches go through a cell at once": ("breadth_first", (0, 1, 0, 1), 3, "never", """
        worker 0 cell 0 | F0 F1 F2           .  .          B2 B1 B0
        worker 0 cell 2 |          F0 F1 F2  .  . B2 B1 B0
        worker 1 cell 1 |  . F0 F1 F2                   B2 B1 B0  .
        worker 1 cell 3 |  .          F0 F1 F2 B2 B1 B0           .
    """),
    "zero_bubble: weight gradients fill the idle time": ("zero_bubble", range(4), 6, "never", """
        worker 0 | F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        worker 1 |  . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        worker 2 |  .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        worker 3 |  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
    """),
    "1f1b recomputes only where more graphs would exist": ("1f1b", range(3), 6, 2, """
        worker 0 | F0 F1 F2  .  . B0 F3 B1 F4 R2 B2 F5 B3 R4 B4  . B5
        worker 1 |  . F0 F1  . B0 F2 B1 F3 B2 F4 B3  . F5 B4  . B5  .
        worker 2 |  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4  . F5 B5  .  .
    """),
}  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_a_schedule_is_drawn_as_its_description_says(name: str) -> None:
    kind, placement, M, policy, text = GRIDS[name]
    drawn = draw_text(simulate(scheduled(kind, placement, M, policy), placement, unit_durations))
    assert drawn == dedent(text).strip("\n")


def test_a_worker_with_two_cells_sends_the_gradient_before_any_weight_gradient() -> None:
    assert printed("zero_bubble", (0, 1, 1), 1, "never")[1] == "ra1.0 F1.0 F2.0 I2.0 I1.0 sg1.0 W2.0 W1.0"


def test_a_cell_without_kept_graphs_is_recomputed_directly_before_its_backward() -> None:
    first = printed("gpipe", (0, 0, 0, 1), 3, (3, 0, 1, 0))[0]
    assert first.endswith("rg2.2 B2.2 R1.2 B1.2 B0.2 R2.1 rg2.1 B2.1 R1.1 B1.1 B0.1 R2.0 rg2.0 B2.0 R1.0 B1.0 B0.0")


@pytest.mark.parametrize(("kind", "placement"), SERVED, ids=str)
def test_the_rules_hold_for_every_training_schedule(kind: str, placement: tuple[int, ...]) -> None:
    mixed = [(3, 1, 2, 0, 4)[cell % 5] for cell in range(len(placement))]
    for policy, M in product((*REMAT, 2, 3, mixed), (1, 2, 3, 8, 13)):
        check_rules(scheduled(kind, placement, M, policy), placement, M, policy)


@pytest.mark.parametrize("placement", [*PLACEMENTS, (0, 1, 0, 1), (0, 1, 2) * 3, (0, 1, 2, 1, 0), (1, 0)], ids=str)
def test_the_rules_hold_for_every_forward_only_schedule_round_robin_too(placement: tuple[int, ...]) -> None:
    for M in (1, 2, 7):
        check_rules(forward_only(placement, M), placement, M)


@pytest.mark.parametrize("W", [2, 5, 12])
def test_no_worker_of_breadth_first_waits_for_room_to_send_however_many_micro_batches_there_are(W: int) -> None:
    placement = tuple(range(W)) * 3
    lists = scheduled("breadth_first", placement, 100, "never")
    check_rules(lists, placement, 100, "never")
    assert simulate(lists, placement, unit_durations).bubble == pytest.approx((W - 1) / (3 * 100 + W - 1))


@pytest.mark.parametrize("worker", range(4))
def test_1f1b_keeps_no_more_micro_batches_than_workers_from_here_to_the_end(worker: int) -> None:
    kept = most_kept(scheduled("1f1b", range(4), 100, "never")[worker])
    assert kept == ({worker: 4 - worker}, {worker: 4 - worker})


def test_plans_are_made_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gpipe_cli.partition import partition\n"
        "from gpipe_cli.schedule import picture, schedule, simulate\n"
        "lists = schedule.schedule('gpipe', (0, 1), 2, (0, 0))\n"
        "timeline = simulate.simulate(lists, (0, 1), simulate.unit_durations)\n"
        "print(picture.draw_text(timeline), partition.partition([1, 2, 3], 2, 'min_max'))\n"
    )
    succeeded(run(sys.executable, "-c", code))


# -- the simulated clock ---------------------------------------------------------------------------------------------


SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (4, 4), (8, 32), (5, 3)]


def timeline(kind: str, K: int, M: int, remat: str = "never", backward: float = 1.0) -> Timeline:
    return simulate(scheduled(kind, range(K), M, remat), range(K), cost_durations([1.0] * K, backward))


def start_of(timeline: Timeline, text: str) -> float:
    wanted = Instruction.parse(text)
    return next(span.start for spans in timeline.spans for span in spans if span.instruction == wanted)


@pytest.mark.parametrize(("K", "M"), SIZES)
def test_zero_bubble_idles_for_a_third_of_it(K: int, M: int) -> None:
    line = timeline("zero_bubble", K, M, backward=2.0)
    if M >= K:
        assert line.span == 3 * M + (K - 1)
    assert line.span <= timeline("1f1b", K, M, backward=2.0).span


@pytest.mark.parametrize("M", [4, 5, 8])
@pytest.mark.parametrize(
    ("kind", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 1), ("interleaved_1f1b", 3), ("breadth_first", 3)]
)
def test_even_cells_have_the_bubble_of_the_formula(kind: str, v: int, M: int) -> None:
    placement = tuple(range(4)) * v
    line = simulate(scheduled(kind, placement, M, "never"), placement, cost_durations([1.0] * len(placement)))
    assert line.bubble == pytest.approx(3 / (v * M + 3))


def test_a_message_takes_its_latency() -> None:
    assert simulate(forward_only(range(3), 1), range(3), unit_durations, latency=0.5).span == 4


def test_a_message_travels_only_from_the_post_of_its_receive_where_posts_are_given() -> None:
    # Worker 1 posts behind F1.0, which ends at 2.5: the message sent at 2 arrives at 3.
    receive = Instruction.parse("ra1.1")
    late = simulate(forward_only((0, 1), 2), (0, 1), unit_durations, 0.5, posts=[{}, {2: [receive]}])
    assert start_of(late, "F1.1") == 3


def test_messages_of_gpipe_travel_while_workers_compute_with_receives_posted_early() -> None:
    lists = scheduled("gpipe", range(8), 32, "never")
    for transfer in (0.1, 0.45):
        steps = [
            simulate(lists, range(8), cost_durations([1.0] * 8), transfer, posts=posts).span
            for posts in (None, post_early(lists), post_when_sent(lists))
        ]
        assert steps[0] == pytest.approx(steps[1])
        assert steps[2] > steps[1] * (1 + 0.4 * transfer)


def test_sends_and_receives_keep_their_worker_busy_for_the_host_s_time() -> None:
    # Worker 0: F0 to 1, send to 1.5, F1 to 2.5, send to 3. Worker 1: F0 from 1.5 to 2.5, F1 from 3.
    slow_host = simulate(forward_only((0, 1), 2), (0, 1), unit_durations, host=0.5)
    assert [start_of(slow_host, name) for name in ("F0.1", "F1.0", "F1.1")] == [1.5, 1.5, 3]
    # The message is there at 2.5, but the receive still takes its own time: 0.5 after F0, which ends at 11.5.
    early = simulate(forward_only((0, 1), 2), (0, 1), lambda i: 1.0 + 9.0 * i.cell, host=0.5)
    assert start_of(early, "F1.1") == pytest.approx(1.5 + 10 + 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_starts_before_the_gradient_arrives(kind: str) -> None:
    line = timeline(kind, 4, 4, "always")
    first = 3 if kind in ("gpipe", "breadth_first") else 0
    assert start_of(line, f"R0.{first}") < start_of(line, f"sg1.{first}")


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 0, 1)], ids=str)
def test_a_picture_shows_forward_recompute_backward_and_idle_in_their_colours(placement: tuple[int, ...]) -> None:
    line = simulate(scheduled("gpipe", placement, 4, "always"), placement, unit_durations)
    drawn = str(draw_panels({"gpipe": line}))
    bars = {name: drawn.count(f'class="f-{name}" d="M') for name in ("blue", "pale", "orange", "idle")}
    assert all(bars.values()), bars
    assert 'aria-label="gpipe: K = 3, M = 4, bubble' in drawn
