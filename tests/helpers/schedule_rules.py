"""Checks instruction lists against the rules of a synchronous pipeline (paper, section 2.2)."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

from gpipe_cli.schedule.instruction import BACK, Instruction, InstructionLists, Op
from gpipe_cli.schedule.rules import check_lists
from gpipe_cli.schedule.schedule import kept_graphs, schedule

Policy = str | int | Sequence[int]


def scheduled(kind: str, placement: Sequence[int], M: int, policy: Policy) -> list[list[Instruction]]:
    """Returns the lists of a training step, by a policy as `kept_graphs` takes it."""
    return schedule(kind, placement, M, kept_graphs(policy, len(placement), M))


def check_rules(lists: InstructionLists, placement: Sequence[int], M: int, policy: Policy | None = None) -> None:
    """Checks the rules of `check_lists`, and that of a cell with n kept graphs at most n exist, one where n is 0.

    Args:
        policy: None for a forward-only step.

    Raises:
        ScheduleError: a rule of `check_lists` is broken.
        AssertionError: too many graphs, or too few; names the instruction.
    """
    check_lists(lists, placement, M, trains=policy is not None)
    if policy is not None:
        keep = kept_graphs(policy, len(placement), M)
        recomputed = {(i.cell, i.micro_batch) for each in lists for i in each if i.op is Op.RECOMPUTE}
        for instructions in lists:
            _check_graphs(instructions, keep)
        for cell, m in product(range(len(placement)), range(M)):
            if keep[cell] == 0 or keep[cell] >= max(M, 2):
                assert ((cell, m) in recomputed) == (keep[cell] == 0), f"recompute {cell}.{m}"


def _check_graphs(instructions: Sequence[Instruction], keep: Sequence[int]) -> None:
    recomputed = {(i.cell, i.micro_batch) for i in instructions if i.op is Op.RECOMPUTE}
    graphs: Counter[int] = Counter()
    for i in instructions:
        made = i.op is Op.RECOMPUTE or (i.op is Op.FORWARD and (i.cell, i.micro_batch) not in recomputed)
        graphs[i.cell] += made - (i.op in BACK)
        assert graphs[i.cell] <= max(keep[i.cell], 1), f"too many graphs at {i}"
