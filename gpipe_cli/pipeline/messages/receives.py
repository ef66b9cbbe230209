"""Posts the receives of one worker's step when they are due (see `schedule/posting.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ...schedule.instruction import Instruction, Op
from ...schedule.posting import Posts

Pending = TypeVar("Pending")


class Receives(Generic[Pending]):
    """Holds the receives of one step that are posted and not yet waited for.

    Args:
        posts: which receives are due before which instruction.
        post: posts a receive and returns it; None while its shapes are not known: it is tried again before each
            instruction, and the next receives of its kind wait for it, because they must be posted in order.
    """

    def __init__(self, posts: Posts, post: Callable[[Instruction], Pending | None]) -> None:
        self._posts, self._post = posts, post
        self._due: dict[Op, deque[Instruction]] = {Op.RECEIVE_ACTIVATION: deque(), Op.RECEIVE_GRADIENT: deque()}
        self._posted: dict[Instruction, Pending] = {}

    def __bool__(self) -> bool:
        """Returns whether a posted message has not been waited for."""
        return bool(self._posted)

    def post_due(self, position: int) -> None:
        """Posts what is due before the instruction at this position of the list."""
        for instruction in self._posts.get(position, ()):
            self._due[instruction.op].append(instruction)
        for due in self._due.values():
            while due and (pending := self._post(due[0])) is not None:
                self._posted[due.popleft()] = pending

    def take(self, instruction: Instruction) -> Pending | None:
        """Returns the next receive of its kind if it was posted; if None, the caller posts it."""
        pending = self._posted.pop(instruction, None)
        if pending is None:
            self._due[instruction.op].popleft()
        return pending
