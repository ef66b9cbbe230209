"""Reads and writes a step's instruction lists as a text file, for `pipeline.schedule=FILE`.

A line holds the instructions of a worker, from worker 0 on, separated by spaces, as ``F0.0 sa0.0 rg0.0 B0.0``. What
follows a ``#`` is a comment. The file says all: K, M, the workers, where each cell lies, which graphs are kept.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .instruction import Instruction, InstructionLists, ScheduleError
from .orders import KINDS
from .rules import check_lists


@dataclass(frozen=True)
class OwnLists:
    """Holds the checked lists of a file.

    Attributes:
        lists: one list of instructions for each worker.
        placement: ``placement[cell]`` is the cell's worker.
        M: micro-batches.
    """

    lists: list[list[Instruction]]
    placement: tuple[int, ...]
    M: int

    def of(self, M: int) -> list[list[Instruction]]:
        """Returns the lists of a mini-batch of M micro-batches, which may be fewer: the first ones."""
        return [[i for i in each if i.micro_batch < M] for each in self.lists]


def is_file(kind: str) -> bool:
    """Returns whether `pipeline.schedule` names a file rather than a kind."""
    return kind not in KINDS


@lru_cache(maxsize=4)
def read_lists(file: str) -> OwnLists:
    """Reads a file.

    Raises:
        ScheduleError: it cannot be read, or the lists break a rule; names the file and the instruction.
    """
    try:
        rows = [line.partition("#")[0].split() for line in Path(file).expanduser().read_text().splitlines()]
        lists = [[Instruction.parse(word) for word in row] for row in rows if row]
        worker_of = {i.cell: worker for worker, each in enumerate(lists) for i in each}
        if not lists or sorted(worker_of) != list(range(len(worker_of))):
            raise ScheduleError("give one line for each worker, with cells from 0 on")
        M = 1 + max(i.micro_batch for each in lists for i in each)
        placement = tuple(worker_of[cell] for cell in range(len(worker_of)))
        check_lists(lists, placement, M)
    except (OSError, UnicodeDecodeError, ScheduleError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"pipeline.schedule={file}: {said}") from error
    return OwnLists(lists, placement, M)


def why_not_for(file: str, K: int, M: int, workers: int) -> str:
    """Returns why the file's lists are not for this pipeline, with what to type; empty if they are."""
    own = read_lists(file)
    sizes = {"K": (len(own.placement), K), "M": (own.M, M), "workers": (len(own.lists), workers)}
    if all(theirs == ours for theirs, ours in sizes.values()):
        return ""
    words = " ".join(f"pipeline.{key}={theirs}" for key, (theirs, _) in sizes.items())
    return f"pipeline.schedule={file} is for {words}"


def as_text(lists: InstructionLists) -> str:
    """Returns the text of a file with these lists."""
    return "".join(" ".join(map(str, each)) + "\n" for each in lists)
