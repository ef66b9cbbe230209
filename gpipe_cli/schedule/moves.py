"""Places the instructions that bring the state of cells to a worker's memory and take it away (`pipeline.offload`)."""

from collections.abc import Sequence
from itertools import groupby

from .instruction import COMPUTE, Instruction, InstructionLists, Op, ScheduleError


def with_moves(lists: InstructionLists) -> list[list[Instruction]]:
    """Returns the lists in which each cell's state is there while it runs, and is brought while another cell runs.

    Raises:
        ScheduleError: a cell would be brought more than twice; says which kinds serve.
    """
    return [_with_moves(worker, instructions) for worker, instructions in enumerate(lists)]


def _with_moves(worker: int, instructions: Sequence[Instruction]) -> list[Instruction]:
    computations = [(at, i) for at, i in enumerate(instructions) if i.op in COMPUTE]
    turns = [list(turn) for _, turn in groupby(computations, key=lambda pair: pair[1].cell)]
    cells = {i.cell for _, i in computations}
    if len(turns) > 2 * len(cells):
        raise ScheduleError(
            f"pipeline.offload=true: worker {worker} would turn {len(turns)} times a step from one of its {len(cells)} "
            "cells to another: use pipeline.schedule=breadth_first or gpipe, or one cell a worker"
        )
    before: dict[int, list[Instruction]] = {}
    for number, turn in enumerate(turns):
        (first, begin), (last, end) = turn[0], turn[-1]
        brought = before.setdefault(first, [])
        if number == 0:
            brought.append(Instruction(Op.BRING, begin.cell, begin.micro_batch))
        if number + 1 < len(turns):
            later = turns[number + 1][0][1]
            brought.append(Instruction(Op.BRING, later.cell, later.micro_batch))
        behind = last + 1
        while behind < len(instructions) and instructions[behind].sent_message is not None:
            behind += 1
        before.setdefault(behind, []).append(Instruction(Op.TAKE_AWAY, end.cell, end.micro_batch))
    made: list[Instruction] = []
    for at, instruction in enumerate([*instructions, None]):
        made += before.get(at, ())
        if instruction is not None:
            made.append(instruction)
    return made
