"""Defines the instructions of a schedule, printed as ``F2.0`` or ``sa1.3``.

| code | instruction | meaning for cell k |
|---|---|---|
| F | FORWARD | runs F_k |
| R | RECOMPUTE | runs F_k again from its kept input, now keeping the graph |
| B | BACKWARD | runs B_k, adding to the gradients of the cell's weights |
| I | INPUT_GRADIENT | the half of B_k that other workers wait for: the gradient of k's input |
| W | WEIGHT_GRADIENT | the other half: adds to the gradients of the cell's weights |
| sa | SEND_ACTIVATION | sends k's output to the worker of cell k+1 |
| ra | RECEIVE_ACTIVATION | waits for k's input |
| sg | SEND_GRADIENT | sends the gradient of k's input to the worker of cell k-1 |
| rg | RECEIVE_GRADIENT | waits for the gradient of k's output |
| in | BRING | begins to bring k's weights and gradients to the memory; with the micro-batch that needs them |
| out | TAKE_AWAY | gives their memory back, with what has changed |

The backward of a micro-batch through a cell is either B, or I and later W.
"""

import enum
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import ConfigurationError


class ScheduleError(ConfigurationError):
    """Raised when a schedule cannot be made, or when instruction lists break its rules."""


class Op(enum.Enum):
    """Lists the kinds of instruction; the value is the code in print."""

    __hash__ = object.__hash__  # searches look up millions; that of an enumeration is written in Python

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_ACTIVATION = "sa"
    RECEIVE_ACTIVATION = "ra"
    SEND_GRADIENT = "sg"
    RECEIVE_GRADIENT = "rg"
    BRING = "in"
    TAKE_AWAY = "out"


COMPUTE = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
MOVES = (Op.BRING, Op.TAKE_AWAY)
BACK = (Op.BACKWARD, Op.INPUT_GRADIENT)  # they make the gradient of the cell's input
_PRINTED = re.compile(rf"({'|'.join(op.value for op in Op)})(\d+)\.(\d+)")


class Message(NamedTuple):
    """Names one message: a boundary of one micro-batch, on its way to the next cell or back.

    Attributes:
        direction: "activation", to the next cell, or "gradient", back from it.
        boundary: the cell before the boundary.
        micro_batch: counted from 0.
    """

    direction: str
    boundary: int
    micro_batch: int

    @property
    def sender(self) -> int:
        """Returns the cell whose worker sends the message."""
        return self.boundary if self.direction == "activation" else self.boundary + 1

    @property
    def receiver(self) -> int:
        """Returns the cell whose worker receives the message."""
        return self.boundary + 1 if self.direction == "activation" else self.boundary


@dataclass(frozen=True, repr=False)
class Instruction:
    """Describes one instruction of a worker, for one micro-batch of one cell (both counted from 0)."""

    op: Op
    cell: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.cell}.{self.micro_batch}"

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str) -> "Instruction":
        """Parses the text that ``str`` prints. Raises ScheduleError for any other text."""
        match = _PRINTED.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is no instruction: write it as F2.0 or sa1.3")
        return cls(Op(match[1]), int(match[2]), int(match[3]))

    @cached_property
    def sent_message(self) -> Message | None:
        """Returns the message that this instruction sends, if it is a send."""
        if self.op is Op.SEND_ACTIVATION:
            return Message("activation", self.cell, self.micro_batch)
        if self.op is Op.SEND_GRADIENT:
            return Message("gradient", self.cell - 1, self.micro_batch)
        return None

    @cached_property
    def awaited_message(self) -> Message | None:
        """Returns the message that this instruction waits for, if it is a receive."""
        if self.op is Op.RECEIVE_ACTIVATION:
            return Message("activation", self.cell - 1, self.micro_batch)
        if self.op is Op.RECEIVE_GRADIENT:
            return Message("gradient", self.cell, self.micro_batch)
        return None


InstructionLists = Sequence[Sequence[Instruction]]


def send_window(workers: int) -> int:
    """Returns the most messages of one direction that a worker keeps while they are on their way.

    Enough for every kind of schedule (a test checks it): an interleaved one sends about W/2 messages ahead.
    """
    return max(4, workers)


def execution_order(lists: InstructionLists) -> Iterator[tuple[int, Instruction]]:
    """Yields (worker, instruction) in an order that one process could execute.

    A receive waits for its send; a send waits while `send_window` earlier messages have not been received.

    Raises:
        ScheduleError: at the end, if some workers wait for ever; names the instruction at which each waits.
    """
    positions, window = [0] * len(lists), send_window(len(lists))
    sent: set[Message] = set()
    received: set[Message] = set()
    on_their_way: dict[tuple[int, str], deque[Message]] = defaultdict(lambda: deque(maxlen=window))
    waiting: dict[Message, int] = {}  # the worker that waits until this message is sent, or received
    runnable = list(range(len(lists)))
    while runnable:
        worker = runnable.pop()
        while positions[worker] < len(lists[worker]):
            instruction = lists[worker][positions[worker]]
            awaited, message = instruction.awaited_message, instruction.sent_message
            if awaited is not None and awaited not in sent:
                waiting[awaited] = worker
                break
            if message is not None:
                own = on_their_way[worker, message.direction]
                if len(own) == window and own[0] not in received:
                    waiting[own[0]] = worker
                    break
                own.append(message)  # a full window drops its oldest
            yield worker, instruction
            positions[worker] += 1
            if message is not None:
                sent.add(message)
            if awaited is not None:
                received.add(awaited)
            if (done := message or awaited) in waiting:
                runnable.append(waiting.pop(done))
    pairs = enumerate(zip(lists, positions, strict=True))
    if stuck := [f"worker {w} waits at {each[position]}" for w, (each, position) in pairs if position < len(each)]:
        raise ScheduleError(f"deadlock: {'; '.join(stuck)}")
