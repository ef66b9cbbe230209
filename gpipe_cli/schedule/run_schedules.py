"""Makes the schedules of a run, each once: the engine executes them, the metrics simulate them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .instruction import Instruction, Op
from .posting import Posts, post_ahead, post_when_sent
from .schedule import forward_only, schedule

GRADIENTS = (Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.SEND_GRADIENT)  # they make or send gradients


class RunSchedules:
    """Makes the instruction lists of a run, by the number of micro-batches of a step.

    Args:
        kind: ``pipeline.schedule``.
        placement: worker of each cell.
        remat: ``pipeline.remat``.
    """

    def __init__(self, kind: str, placement: Sequence[int], remat: str) -> None:
        self.kind, self.placement, self.remat = kind, tuple(placement), remat
        self.training_lists = cache(self._training_lists)
        self.forward_lists = cache(self._forward_lists)
        self.gradients_complete = cache(self._gradients_complete)
        self.training_posts = cache(self._training_posts)
        self.forward_posts = cache(self._forward_posts)

    def _training_lists(self, M: int) -> list[list[Instruction]]:
        """Returns one list per worker for a training step."""
        return schedule(self.kind, self.placement, M, self.remat)

    def _gradients_complete(self, M: int) -> list[dict[int, int]]:
        """Returns `gradients_complete` of each worker's list for a training step."""
        return [gradients_complete(instructions) for instructions in self.training_lists(M)]

    def _forward_lists(self, M: int) -> list[list[Instruction]]:
        """Returns one list per worker for a step of evaluation or generation."""
        return forward_only(self.placement, M)

    def _training_posts(self, M: int, when_sent: bool) -> list[Posts]:
        """Returns for each worker when it posts the receives of a training step.

        Args:
            when_sent: by `post_when_sent`, for receives that occupy the device; else by `post_ahead`.
        """
        return _posts(self.training_lists(M), when_sent)

    def _forward_posts(self, M: int, when_sent: bool) -> list[Posts]:
        """Returns the same for a forward-only step."""
        return _posts(self.forward_lists(M), when_sent)


def gradients_complete(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Returns the cells of a list by the position of the last instruction that makes or sends their gradients."""
    last = {i.cell: position for position, i in enumerate(instructions) if i.op in GRADIENTS}
    return {position: cell for cell, position in last.items()}


def _posts(lists: list[list[Instruction]], when_sent: bool) -> list[Posts]:
    return post_when_sent(lists) if when_sent else [post_ahead(instructions) for instructions in lists]
