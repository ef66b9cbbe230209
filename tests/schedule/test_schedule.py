"""Tests that schedules are the paper's, that the validator refuses every fault, and what a worker keeps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from textwrap import dedent

import pytest

from gpipe_cli.schedule.instruction import Instruction, Op, ScheduleError, execution_order
from gpipe_cli.schedule.orders import KINDS, ROUND_ROBIN
from gpipe_cli.schedule.picture import draw_text
from gpipe_cli.schedule.schedule import REMAT, forward_only, most_kept, schedule
from gpipe_cli.schedule.simulate import simulate, unit_durations
from gpipe_cli.schedule.validate import validate

PLACEMENTS = [(0,), (0, 0, 0), (0, 1), (0, 1, 2, 3), (0, 0, 1), (0, 1, 1, 1, 2), (0, 0, 1, 1, 2, 2)]
ROUND = [(0,), (0, 0, 0), (0, 1), (0, 1, 0, 1), (0, 1, 2) * 3, (0, 1, 2, 3, 4) * 2]
SERVED = [(kind, placement) for kind in KINDS for placement in (ROUND if kind in ROUND_ROBIN else PLACEMENTS)]


def grid(kind: str, placement: Sequence[int], M: int, remat: str) -> str:
    return draw_text(simulate(schedule(kind, placement, M, remat), placement, unit_durations))


def lines(text: str) -> str:
    return dedent(text).strip("\n")


def parsed(*workers: str) -> list[list[Instruction]]:
    return [[Instruction.parse(word) for word in words.split()] for words in workers]


def printed(kind: str, placement: Sequence[int], M: int, remat: str) -> list[str]:
    return [" ".join(map(str, instructions)) for instructions in schedule(kind, placement, M, remat)]


class TestGpipe:
    def test_without_recompute_is_the_papers_figure_2c(self) -> None:
        assert grid("gpipe", range(4), 4, "never") == lines("""
            worker 0 | F0 F1 F2 F3  .  .  .  .  .  . B3 B2 B1 B0
            worker 1 |  . F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0  .
            worker 2 |  .  . F0 F1 F2 F3  .  . B3 B2 B1 B0  .  .
            worker 3 |  .  .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .  .
        """)

    def test_always_recomputes_the_first_backward_inside_the_bubble(self) -> None:
        assert grid("gpipe", range(3), 4, "always") == lines("""
            worker 0 | F0 F1 F2 F3 R3  .  .  .  . B3 R2 B2 R1 B1 R0 B0
            worker 1 |  . F0 F1 F2 F3 R3  .  . B3 R2 B2 R1 B1 R0 B0  .
            worker 2 |  .  . F0 F1 F2 F3 R3 B3 R2 B2 R1 B1 R0 B0  .  .
        """)

    def test_except_last_keeps_the_graph_of_the_micro_batch_that_comes_back_first(self) -> None:
        assert grid("gpipe", range(3), 4, "except_last") == lines("""
            worker 0 | F0 F1 F2 F3  .  .  .  . B3 R2 B2 R1 B1 R0 B0
            worker 1 |  . F0 F1 F2 F3  .  . B3 R2 B2 R1 B1 R0 B0  .
            worker 2 |  .  . F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0  .  .
        """)

    def test_two_cells_on_a_worker_run_one_after_the_other(self) -> None:
        assert grid("gpipe", (0, 0, 1), 2, "always") == lines("""
            worker 0 cell 0 | F0    F1        .  .    R1 B1       R0 B0
            worker 0 cell 1 |    F0    F1 R1  .  . B1       R0 B0
            worker 1 cell 2 |  .  . F0  . F1 R1 B1 R0 B0  .  .  .  .  .
        """)


class TestOneForwardOneBackward:
    def test_without_recompute(self) -> None:
        assert grid("1f1b", range(3), 4, "never") == lines("""
            worker 0 | F0 F1 F2  .  . B0 F3 B1  . B2  . B3
            worker 1 |  . F0 F1  . B0 F2 B1 F3 B2  . B3  .
            worker 2 |  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
        """)

    def test_except_last_never_recomputes_on_the_last_worker(self) -> None:
        assert grid("1f1b", range(3), 4, "except_last") == lines("""
            worker 0 | F0 F1 F2 R0  . B0 F3 R1 B1 R2  . B2 R3 B3
            worker 1 |  . F0 F1 R0 B0 F2 R1 B1 F3 R2 B2 R3 B3  .
            worker 2 |  .  . F0 B0 F1 B1 F2 B2  . F3 B3  .  .  .
        """)

    def test_always_recomputes_everything(self) -> None:
        assert grid("1f1b", range(3), 4, "always") == lines("""
            worker 0 | F0 F1 F2 R0  .  . B0 F3 R1 B1 R2  . B2 R3  . B3
            worker 1 |  . F0 F1 R0  . B0 F2 R1 B1 F3 R2 B2 R3  . B3  .
            worker 2 |  .  . F0 R0 B0 F1 R1 B1 F2 R2 B2 F3 R3 B3  .  .
        """)

    def test_fewer_micro_batches_than_workers_is_all_forward_then_all_backward(self) -> None:
        assert grid("1f1b", range(4), 2, "never") == lines("""
            worker 0 | F0 F1  .  .  .  .  . B0  . B1
            worker 1 |  . F0 F1  .  .  . B0  . B1  .
            worker 2 |  .  . F0 F1  . B0  . B1  .  .
            worker 3 |  .  .  . F0 B0 F1 B1  .  .  .
        """)


class TestInterleaved:
    def test_a_group_of_micro_batches_goes_through_the_first_cells_then_through_the_next(self) -> None:
        assert grid("interleaved_1f1b", (0, 1, 0, 1), 4, "never") == lines("""
            worker 0 cell 0 | F0 F1       F2    F3       B0    B1  .     .    B2 B3
            worker 0 cell 2 |       F0 F1    B0    B1 F2    F3     . B2  . B3
            worker 1 cell 1 |  . F0 F1             F2 B0 F3 B1             B2 B3  .
            worker 1 cell 3 |  .       F0 B0 F1 B1             F2 B2 F3 B3        .
        """)

    def test_except_last_recomputes_where_the_backward_does_not_follow_its_forward(self) -> None:
        assert grid("interleaved_1f1b", (0, 1, 0, 1), 2, "except_last") == lines("""
            worker 0 cell 0 | F0 F1                   R0 B0 R1 B1
            worker 0 cell 2 |       F0 F1 R0 B0 R1 B1
            worker 1 cell 1 |  . F0 F1             R0 B0 R1 B1  .
            worker 1 cell 3 |  .       F0 B0 F1 B1              .
        """)

    def test_five_micro_batches_on_three_workers_are_one_group(self) -> None:
        assert grid("interleaved_1f1b", (0, 1, 2) * 2, 5, "never") == lines("""
            worker 0 cell 0 | F0 F1 F2 F3 F4                    .     .     .     .    B0 B1 B2 B3 B4
            worker 0 cell 3 |                F0 F1 F2 F3 F4 B0  . B1  . B2  . B3  . B4
            worker 1 cell 1 |  . F0 F1 F2 F3 F4                          .     .    B0 B1 B2 B3 B4  .
            worker 1 cell 4 |  .                F0 F1 F2 B0 F3 B1 F4 B2  . B3  . B4                 .
            worker 2 cell 2 |  .  . F0 F1 F2 F3 F4                               B0 B1 B2 B3 B4  .  .
            worker 2 cell 5 |  .  .                F0 B0 F1 B1 F2 B2 F3 B3 F4 B4                 .  .
        """)

    @pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 0, 0)], ids=str)
    def test_with_one_run_of_cells_on_each_worker_it_is_1f1b(self, placement: tuple[int, ...]) -> None:
        assert schedule("interleaved_1f1b", placement, 5, "always") == schedule("1f1b", placement, 5, "always")

    @pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 0), (0, 1, 0, 1, 0)], ids=str)
    def test_another_placement_is_refused(self, placement: tuple[int, ...]) -> None:
        with pytest.raises(ScheduleError, match=r"cell c on worker c mod W.*use one like \[0, 1, 0, 1"):
            schedule("interleaved_1f1b", placement, 4, "never")


class TestZeroBubble:
    def test_weight_gradients_fill_the_idle_time(self) -> None:
        assert grid("zero_bubble", range(4), 6, "never") == lines("""
            worker 0 | F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
            worker 1 |  . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
            worker 2 |  .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
            worker 3 |  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
        """)

    def test_always_recomputes_before_the_first_half(self) -> None:
        assert grid("zero_bubble", range(2), 3, "always") == lines("""
            worker 0 | F0 F1 R0  . I0 W0 F2 R1 I1 W1 R2 I2 W2
            worker 1 |  . F0 R0 I0 F1 R1 I1 W0 F2 R2 I2 W1 W2
        """)

    def test_a_worker_with_two_cells_sends_the_gradient_before_any_weight_gradient(self) -> None:
        assert printed("zero_bubble", (0, 1, 1), 1, "never")[1] == "ra1.0 F1.0 F2.0 I2.0 I1.0 sg1.0 W2.0 W1.0"


class TestMessages:
    def test_one_worker_sends_nothing(self) -> None:
        assert printed("gpipe", (0, 0), 1, "never") == ["F0.0 F1.0 B1.0 B0.0"]

    def test_a_send_stands_directly_after_what_it_sends(self) -> None:
        assert printed("gpipe", (0, 1), 1, "never") == ["F0.0 sa0.0 rg0.0 B0.0", "ra1.0 F1.0 B1.0 sg1.0"]

    def test_always_recomputes_only_the_workers_last_cell_before_the_gradient_arrives(self) -> None:
        assert printed("gpipe", (0, 0, 1), 1, "always")[0] == "F0.0 F1.0 sa1.0 R1.0 rg1.0 B1.0 R0.0 B0.0"

    def test_except_last_recomputes_all_the_workers_cells_before_the_gradient_arrives(self) -> None:
        first = printed("gpipe", (0, 0, 1), 2, "except_last")[0]
        assert first.endswith("rg1.1 B1.1 B0.1 R1.0 R0.0 rg1.0 B1.0 B0.0")


class TestInstruction:
    @pytest.mark.parametrize("op", Op)
    def test_prints_and_parses_back(self, op: Op) -> None:
        instruction = Instruction(op, 12, 345)
        assert Instruction.parse(str(instruction)) == instruction

    def test_prints_its_code_cell_and_micro_batch(self) -> None:
        assert str(Instruction(Op.RECEIVE_GRADIENT, 3, 1)) == "rg3.1"

    @pytest.mark.parametrize("text", ["", "F", "F1", "X1.2", "F1.2 ", "f1.2", "F-1.2"])
    def test_refuses_other_text(self, text: str) -> None:
        with pytest.raises(ScheduleError, match=r"write it as F2\.0 or sa1\.3"):
            Instruction.parse(text)


class TestArguments:
    def test_unknown_kind_lists_the_known_ones(self) -> None:
        with pytest.raises(ScheduleError, match="unknown kind of schedule 'gpip': use gpipe, 1f1b"):
            schedule("gpip", (0, 1), 2, "never")

    def test_unknown_remat_lists_the_known_ones(self) -> None:
        with pytest.raises(ScheduleError, match=r"pipeline\.remat=often: use always, except_last, never"):
            schedule("gpipe", (0, 1), 2, "often")

    def test_no_micro_batch(self) -> None:
        with pytest.raises(ScheduleError, match=r"pipeline\.M=0"):
            schedule("gpipe", (0, 1), 0, "never")

    def test_a_worker_without_a_cell(self) -> None:
        with pytest.raises(ScheduleError, match="every worker has a cell"):
            schedule("gpipe", (0, 2), 2, "never")

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ROUND_ROBIN])
    def test_round_robin_placement_is_refused_by_kinds_that_cannot_serve_it(self, kind: str) -> None:
        with pytest.raises(ScheduleError, match=r"placement is \[0, 1, 0, 1\]: use one like \[0, 0, 1, 1\]"):
            schedule(kind, (0, 1, 0, 1), 2, "never")


class TestValidatorAccepts:
    @pytest.mark.parametrize(("kind", "placement"), SERVED, ids=str)
    @pytest.mark.parametrize("remat", REMAT)
    @pytest.mark.parametrize("M", [1, 2, 3, 8, 13])
    def test_every_training_schedule(self, kind: str, remat: str, placement: tuple[int, ...], M: int) -> None:
        validate(schedule(kind, placement, M, remat), placement, M, remat)

    @pytest.mark.parametrize("placement", [*PLACEMENTS, (0, 1, 0, 1), (0, 1, 2) * 3, (0, 1, 2, 1, 0), (1, 0)], ids=str)
    @pytest.mark.parametrize("M", [1, 2, 7])
    def test_every_forward_only_schedule_round_robin_too(self, placement: tuple[int, ...], M: int) -> None:
        validate(forward_only(placement, M), placement, M)

    @pytest.mark.parametrize(("W", "M"), [(5, 13), (9, 25), (12, 31), (17, 46)], ids=str)
    def test_interleaved_steps_whose_last_group_of_micro_batches_is_small(self, W: int, M: int) -> None:
        """A worker is further ahead of the next one than in any other schedule."""
        placement = tuple(range(W)) * 2
        validate(schedule("interleaved_1f1b", placement, M, "never"), placement, M, "never")

    def test_a_hand_written_round_robin_step(self) -> None:
        lists = parsed(
            "F0.0 sa0.0 ra2.0 F2.0 sa2.0 rg2.0 B2.0 sg2.0 rg0.0 B0.0",
            "ra1.0 F1.0 sa1.0 ra3.0 F3.0 B3.0 sg3.0 rg1.0 B1.0 sg1.0",
        )
        validate(lists, (0, 1, 0, 1), 1, "never")

    def test_a_step_of_many_cells_and_micro_batches(self) -> None:
        validate(schedule("1f1b", range(32), 128, "always"), range(32), 128, "always")


FAULTS = {
    "a forward is missing": (
        ["F0.0 sa0.0 rg0.0 B0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        2,
        "worker 0: F0.1 is missing",
    ),
    "a backward is missing": (
        ["F0.0 sa0.0 rg0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0: B0.0 is missing",
    ),
    "the weights' half of a backward is missing": (
        ["F0.0 sa0.0 rg0.0 I0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0: W0.0 is missing",
    ),
    "the weights' half before the input's": (
        ["F0.0 sa0.0 rg0.0 W0.0 I0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0, instruction 3, W0.0: needs I0.0 before it, which comes only at 4",
    ),
    "half a backward after a whole one": (
        ["F0.0 sa0.0 rg0.0 B0.0 I0.0 W0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0, instruction 4, I0.0: has come back before",
    ),
    "a forward twice": (
        ["F0.0 F0.0 sa0.0 rg0.0 B0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0, instruction 1, F0.0: stands in the list twice",
    ),
    "a backward before its forward": (
        ["B0.0 F0.0 sa0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0, instruction 0, B0.0: needs F0.0 before it, which comes only at 1",
    ),
    "a backward without its gradient": (
        ["F0.0 sa0.0 B0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0, instruction 2, B0.0: needs rg0.0 before it, which is not in the list",
    ),
    "a forward without its input": (
        ["F0.0 sa0.0 rg0.0 B0.0", "F1.0 B1.0 sg1.0"],
        1,
        "worker 1, instruction 0, F1.0: needs ra1.0 before it, which is not in the list",
    ),
    "a send before its forward": (
        ["sa0.0 F0.0 rg0.0 B0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0, instruction 0, sa0.0: needs F0.0 before it, which comes only at 1",
    ),
    "a recompute after its backward": (
        ["F0.0 sa0.0 rg0.0 B0.0 R0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0, instruction 4, R0.0: recomputes after its backward",
    ),
    "a recompute before its forward": (
        ["R0.0 F0.0 sa0.0 rg0.0 B0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0, instruction 0, R0.0: needs F0.0 before it, which comes only at 1",
    ),
    "a worker too many": (
        ["F0.0 sa0.0 rg0.0 B0.0", "ra1.0 F1.0 B1.0 sg1.0", "F2.0 B2.0"],
        1,
        "3 lists of instructions for the 2 workers of the placement",
    ),
    "a gradient that is not sent": (
        ["F0.0 sa0.0 rg0.0 B0.0", "ra1.0 F1.0 B1.0"],
        1,
        "gradient messages from worker 1 to worker 0: number 0 is sent as nothing but received as rg0.0; "
        "receive in the order of sending",
    ),
    "another worker's cell": (
        ["F0.0 sa0.0 F1.0 rg0.0 B0.0", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0, instruction 2, F1.0: cell 1 is on worker 1",
    ),
    "a cell that does not exist": (
        ["F0.0 sa0.0 rg0.0 B0.0", "ra1.0 F1.0 B1.0 sg1.0 F2.0"],
        1,
        "worker 1, instruction 4, F2.0: cells are counted from 0 to K-1=1",
    ),
    "a micro-batch that does not exist": (
        ["F0.0 sa0.0 rg0.0 B0.0 F0.1", "ra1.0 F1.0 B1.0 sg1.0"],
        1,
        "worker 0, instruction 4, F0.1: micro-batches are counted from 0 to M-1=0",
    ),
    "a message beyond the last cell": (
        ["F0.0 sa0.0 rg0.0 B0.0", "ra1.0 F1.0 sa1.0 B1.0 sg1.0"],
        1,
        "worker 1, instruction 2, sa1.0: there is no cell 2 on the other side",
    ),
    "messages received in another order than sent": (
        ["F0.0 sa0.0 F0.1 sa0.1 rg0.0 B0.0 rg0.1 B0.1", "ra1.1 ra1.0 F1.0 F1.1 B1.0 sg1.0 B1.1 sg1.1"],
        2,
        "activation messages from worker 0 to worker 1: number 0 is sent as sa0.0 but received as ra1.1; "
        "receive in the order of sending",
    ),
}


def refusal(lists: Sequence[Sequence[Instruction]], placement: Sequence[int], M: int, remat: str | None) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(lists, placement, M, remat)
    return str(caught.value)


class TestValidatorRefuses:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_planted_fault(self, fault: str) -> None:
        workers, M, message = FAULTS[fault]
        assert refusal(parsed(*workers), (0, 1), M, "except_last") == message

    def test_a_message_inside_a_worker(self) -> None:
        lists = parsed("F0.0 F1.0 sa0.0 B1.0 B0.0")
        assert refusal(lists, (0, 0), 1, "never").endswith(
            "cell 1 is on the same worker, where a boundary is no message"
        )

    def test_always_without_a_recompute(self) -> None:
        assert "B0.0: needs R0.0 before it" in refusal(schedule("gpipe", (0, 1), 1, "except_last"), (0, 1), 1, "always")

    def test_never_with_a_recompute(self) -> None:
        message = refusal(schedule("gpipe", (0, 1), 2, "always"), (0, 1), 2, "never")
        assert message.endswith("R0.1: pipeline.remat=never recomputes nothing")

    def test_a_backward_in_a_forward_only_step(self) -> None:
        message = refusal(schedule("gpipe", (0,), 1, "never"), (0,), 1, None)
        assert message.endswith("B0.0: a forward-only step has no recompute, backward or gradient")

    def test_workers_that_wait_for_each_other_in_a_circle(self) -> None:
        lists = parsed(
            "F0.0 sa0.0 rg0.0 B0.0 F0.1 sa0.1 rg0.1 B0.1",
            "ra1.0 ra1.1 F1.0 F1.1 B1.0 sg1.0 B1.1 sg1.1",
        )
        assert refusal(lists, (0, 1), 2, "never") == (
            "deadlock: worker 0 waits at rg0.0 (instruction 2); worker 1 waits at ra1.1 (instruction 1)"
        )

    def test_a_worker_whose_messages_are_received_only_after_it_has_sent_more_than_it_may_keep(self) -> None:
        rest = " ".join(f"ra2.{m} F2.{m} B2.{m} sg2.{m} rg0.{m} B0.{m}" for m in range(6))
        lists = parsed(
            " ".join(f"F0.{m} sa0.{m}" for m in range(6)) + " " + rest,
            " ".join(f"ra1.{m} F1.{m} sa1.{m} rg1.{m} B1.{m} sg1.{m}" for m in range(6)),
        )
        assert refusal(lists, (0, 1, 0), 6, "never") == (
            "deadlock: worker 0 waits at sa0.5 (instruction 11, with 4 messages of the kind on their way); "
            "worker 1 waits at rg1.0 (instruction 3)"
        )


class TestExecutionOrder:
    def test_yields_every_instruction_once_and_no_receive_before_its_send(self) -> None:
        lists = schedule("1f1b", (0, 1, 1, 2), 5, "always")
        sent = set()
        done = []
        for _, instruction in execution_order(lists):
            assert instruction.awaited_message is None or instruction.awaited_message in sent
            sent.add(instruction.sent_message)
            done.append(instruction)
        assert sorted(map(str, done)) == sorted(str(i) for instructions in lists for i in instructions)


class TestMostKept:
    def test_gpipe_keeps_every_input_but_one_graph(self) -> None:
        kept = most_kept(schedule("gpipe", range(4), 8, "except_last")[1])
        assert (kept.inputs, kept.graphs) == ({1: 8}, {1: 1})

    @pytest.mark.parametrize("worker", range(4))
    def test_1f1b_keeps_no_more_micro_batches_than_workers_from_here_to_the_end(self, worker: int) -> None:
        kept = most_kept(schedule("1f1b", range(4), 100, "never")[worker])
        assert (kept.inputs, kept.graphs) == ({worker: 4 - worker}, {worker: 4 - worker})

    @pytest.mark.parametrize("worker", range(4))
    def test_zero_bubble_keeps_no_more_than_the_first_worker_of_1f1b(self, worker: int) -> None:
        assert most_kept(schedule("zero_bubble", range(4), 100, "never")[worker]).graphs == {worker: 4}

    def test_interleaved_keeps_more_than_1f1b_but_not_the_whole_mini_batch(self) -> None:
        first = schedule("interleaved_1f1b", (0, 1, 2, 3) * 2, 100, "never")[0]
        assert most_kept(first).together == 2 * (4 + 3 / 2), "W + (W-1)/v, of v cells"

    def test_always_keeps_the_graph_of_one_cell_at_a_time(self) -> None:
        lists = schedule("gpipe", (0, 0, 0, 1), 4, "always")
        assert most_kept(lists[0]).together == 1

    def test_except_last_keeps_the_graphs_of_one_micro_batch_for_all_the_workers_cells(self) -> None:
        lists = schedule("gpipe", (0, 0, 0, 1), 4, "except_last")
        assert most_kept(lists[0]).together == 3


def test_plans_are_made_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gpipe_cli.partition import partition\n"
        "from gpipe_cli.schedule import picture, schedule, simulate, validate\n"
        "lists = schedule.schedule('gpipe', (0, 1), 2, 'always')\n"
        "validate.validate(lists, (0, 1), 2, 'always')\n"
        "timeline = simulate.simulate(lists, (0, 1), simulate.unit_durations)\n"
        "print(picture.draw_text(timeline), partition.partition([1, 2, 3], 2, 'min_max'))\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
