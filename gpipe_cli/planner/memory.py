"""Adds up what a worker holds at every moment of a step, from its list of instructions: sizes only, no tensors.

The list is the one that the engine runs, and what an instruction leaves in memory follows the engine: a boundary lives
from its forward to the last computation of its micro-batch in the cell behind it, a graph from the run that built it to
the last computation of its cell, a gradient until it is used or sent, a message from the moment it is posted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..pipeline.messages.shared_memory import slot_bytes
from ..schedule.instruction import Instruction, Op, send_window
from ..schedule.posting import Posts, Receives, post_ahead, post_when_sent
from ..schedule.simulate import Timeline

MINI_BATCH, INPUTS, GRAPHS, MESSAGES, RUNNING = "mini_batch", "inputs", "graphs", "messages", "running"
SHARED = "shared"
SENDS = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
KINDS = (MINI_BATCH, INPUTS, GRAPHS, MESSAGES, SHARED, RUNNING)


class Wire(Enum):
    """Names how messages travel, which decides which worker keeps them and for how long."""

    NCCL = "nccl"  # the sender keeps a message until its receiver is ready, so several if it is ahead of its neighbour
    GLOO = "gloo"  # the sender keeps its latest messages, as many as the window has: gloo does not report departures
    SHARED_MEMORY = "shared memory"  # in slots, as many as were ever on their way; the receiver copies a message out


@dataclass(frozen=True)
class CellSizes:
    """Holds the bytes of one micro-batch in one cell.

    Attributes:
        gathered: BatchNorm's statistics, kept until the mini-batch has ended.
        casts: weights that autocast uses in half precision, kept as long, once for all micro-batches.
        message: the message from the cell before: all tensors in front of the cell, and the targets.
        targets: targets of the micro-batch.
        graph: kept by forward for backward, without inputs and outputs.
        outputs: memory of its own that the cell hands on; 0 for the last, whose outputs only the loss reads.
        input_gradients: gradients that it hands back.
        output_gradients: gradients that it gets.
        inference: most bytes alive beside all this while it runs without a graph.
        forward: the same with a graph, that graph included.
        backward: the same in backward, without graph and gradients.
        put_off: left by the first half of a backward to the second: graph and noted gradients; 0 where nothing is left.
        input_half: most bytes alive in the first half, without graph and gradients.
        weight_half: most bytes alive in the second half, without what was put off.
    """

    gathered: int
    casts: int
    message: int
    targets: int
    graph: int
    outputs: int
    input_gradients: int
    output_gradients: int
    inference: int
    forward: int
    backward: int
    put_off: int
    input_half: int
    weight_half: int


def most_alive(timeline: Timeline, sizes: Sequence[CellSizes], wire: Wire) -> list[dict[str, int]]:
    """Returns for each worker the bytes at the worst moment of a training step, without those of the model.

    They are given by kind (`KINDS`): what stays for the whole mini-batch, boundary inputs, graphs, messages and
    gradients on their way, memory shared with the receivers of messages, and what a running operation needs.

    Args:
        timeline: the step, simulated.
        sizes: sizes of every cell of the model.
        wire: the connection between the workers.
    """
    lists = [[span.instruction for span in spans] for spans in timeline.spans]
    posts = post_when_sent(lists) if wire is Wire.NCCL else [post_ahead(each) for each in lists]
    slots = [0] * len(timeline.spans)
    gone: dict[Instruction, int] = {}
    if wire is Wire.NCCL:
        gone = _departures(timeline, posts)
    elif wire is Wire.GLOO:
        gone = _behind_the_window(timeline)
    else:
        slots = _slots(timeline, sizes)
    walks = [_Walk(each, due, sizes, timeline.placement, gone, wire) for each, due in zip(lists, posts, strict=True)]
    return [walk.run(shared) for walk, shared in zip(walks, slots, strict=True)]


def _slots(timeline: Timeline, sizes: Sequence[CellSizes]) -> list[int]:
    """Returns the bytes of each worker's slots of shared memory, which stay from step to step.

    There are as many slots for gradients as it has gradients on their way at once. For activations there are as many
    as the window has, because in an evaluation an early worker runs ahead. Each slot holds the largest message of its
    kind.
    """
    ends = {span.instruction.awaited_message: span.end for spans in timeline.spans for span in spans}
    window = send_window(len(timeline.spans))
    shared = []
    for spans in timeline.spans:
        total = 0
        for op in SENDS:
            sent = [span for span in spans if span.instruction.op is op]
            on_their_way: list[float] = []  # when each will have been taken
            most = len(sent) if op is Op.SEND_ACTIVATION else 0
            for instruction, start, _ in sent:
                on_their_way = [end for end in on_their_way if end > start] + [ends[instruction.sent_message]]
                most = max(most, len(on_their_way))
            largest = max((sent_bytes(span.instruction, sizes) for span in sent), default=0)
            total += min(most, window) * slot_bytes(largest)
        shared.append(total)
    return shared


def sent_bytes(sent: Instruction, sizes: Sequence[CellSizes]) -> int:
    """Returns the bytes of the message that a send instruction sends."""
    return sizes[sent.cell + 1].message if sent.op is Op.SEND_ACTIVATION else sizes[sent.cell].input_gradients


def _behind_the_window(timeline: Timeline) -> dict[Instruction, int]:
    """Returns where in its worker's list each sent message leaves a full window, if that is before the step ends."""
    window = send_window(len(timeline.spans))
    gone: dict[Instruction, int] = {}
    for spans in timeline.spans:
        for op in SENDS:
            places = [place for place, span in enumerate(spans) if span.instruction.op is op]
            gone |= {spans[old].instruction: new for old, new in zip(places, places[window:], strict=False)}
    return gone


def _departures(timeline: Timeline, posts: Sequence[Posts]) -> dict[Instruction, int]:
    """Returns where in its worker's list each sent message has left: its receive has been posted by then."""
    posted = {
        receive.awaited_message: spans[position].start
        for spans, due in zip(timeline.spans, posts, strict=True)
        for position, receives in due.items()
        for receive in receives
    }
    left: dict[Instruction, int] = {}
    for spans in timeline.spans:
        starts = [span.start for span in spans]
        for place, span in enumerate(spans):
            if (sent := span.instruction.sent_message) is not None:
                left[span.instruction] = max(place + 1, bisect_right(starts, posted[sent]))
    return left


class _Walk:
    """Walks through the instructions of one worker and adds up what is in memory."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        posts: Posts,
        sizes: Sequence[CellSizes],
        placement: Sequence[int],
        departures: Mapping[Instruction, int],
        wire: Wire,
    ) -> None:
        self._instructions, self._sizes, self._placement = instructions, sizes, placement
        self._copied = wire is Wire.SHARED_MEMORY
        self._leaving: dict[int, list[Instruction]] = {}
        for instruction in instructions:
            if instruction in departures:
                self._leaving.setdefault(departures[instruction], []).append(instruction)
        computed = [(i, n) for n, i in enumerate(instructions) if i.sent_message is None and i.awaited_message is None]
        uses = ((i, n) for i, n in computed if i.op is not Op.WEIGHT_GRADIENT or sizes[i.cell].put_off)
        self._last_use = {(i.cell, i.micro_batch): n for i, n in uses}
        self._recomputed = {(i.cell, i.micro_batch) for i, _ in computed if i.op is Op.RECOMPUTE}
        self._receives = Receives(posts, self._post)
        self._held: dict[tuple[object, ...], tuple[str, int, set[str]]] = {}  # kind, bytes and holders
        self._now = dict.fromkeys(KINDS, 0)
        self._peak, self._at_peak = 0, dict(self._now)

    def run(self, shared: int) -> dict[str, int]:
        """Returns the bytes of each kind at the worst moment; ``shared``: bytes of this worker's shared memory."""
        self._hold(("slots",), "wire", SHARED, shared)
        micro_batches = 1 + max((i.micro_batch for i in self._instructions), default=-1)
        if any(i.cell == 0 for i in self._instructions):
            self._hold(("mini-batch",), "step", MINI_BATCH, micro_batches * self._sizes[0].message)
        for position, instruction in enumerate(self._instructions):
            self._receives.post_due(position)
            for sent in self._leaving.get(position, ()):
                self._drop(("sending", sent), "wire")
            self._take(instruction)
            if self._last_use.get((instruction.cell, instruction.micro_batch)) == position:
                self._let_go(instruction.cell, instruction.micro_batch)
        return self._at_peak

    def _take(self, instruction: Instruction) -> None:
        cell, number = instruction.cell, instruction.micro_batch
        size = self._sizes[cell]
        if instruction.awaited_message is not None:
            self._receive(instruction)
        elif instruction.op in SENDS:
            if not self._copied:
                self._hold(("sending", instruction), "wire", MESSAGES, sent_bytes(instruction, self._sizes))
            if instruction.op is Op.SEND_ACTIVATION:
                self._drop(("boundary", cell, number), "outgoing")
            else:
                self._drop(("gradient", cell, number), "wire")
        elif instruction.op is Op.FORWARD:
            self._forward(cell, number)
        elif instruction.op is Op.RECOMPUTE:
            self._run(size.forward)
            self._hold(("graph", cell, number), "graph", GRAPHS, size.graph + size.outputs)
        elif instruction.op is Op.BACKWARD:
            self._run(size.backward)
            self._hold(("gradient", cell, number), "wire", MESSAGES, size.input_gradients)
        elif instruction.op is Op.INPUT_GRADIENT:
            self._input_gradient(cell, number)
        else:
            self._run(size.weight_half)

    def _input_gradient(self, cell: int, number: int) -> None:
        size = self._sizes[cell]
        self._run(size.input_half)
        self._hold(("gradient", cell, number), "wire", MESSAGES, size.input_gradients)
        if size.put_off:
            # The cell's input and its gradient stay; of the rest only what the gradients of weights need.
            self._hold(("gradient", cell, number), "input", MESSAGES, size.input_gradients)
            self._drop(("graph", cell, number), "graph")
            self._drop(("boundary", cell, number), "graph")
            self._drop(("gradient", cell + 1, number), "wire")
            self._hold(("put off", cell, number), "graph", GRAPHS, size.put_off)

    def _forward(self, cell: int, number: int) -> None:
        size, keeps = self._sizes[cell], (cell, number) not in self._recomputed
        self._hold(("gathered", cell, number), "step", MINI_BATCH, size.gathered)
        self._hold(("casts", cell), "step", MINI_BATCH, size.casts)
        self._run(size.forward if keeps else size.inference)
        if keeps:
            self._hold(("graph", cell, number), "graph", GRAPHS, size.graph)
            self._hold(("boundary", cell, number), "graph", GRAPHS, size.outputs)
        if cell + 1 < len(self._placement):
            inside = self._placement[cell + 1] == self._placement[cell]
            kind, holder = (INPUTS, "input") if inside else (MESSAGES, "outgoing")
            self._hold(("boundary", cell, number), holder, kind, size.outputs)

    def _receive(self, instruction: Instruction) -> None:
        cell, number, size = instruction.cell, instruction.micro_batch, self._sizes[instruction.cell]
        if self._receives.take(instruction):
            self._drop(("posted", instruction.op, cell, number), "wire")
        if instruction.op is Op.RECEIVE_ACTIVATION:
            apart = size.targets if self._copied else 0
            self._hold(("received", cell, number), "input", INPUTS, size.message - apart)
            self._hold(("targets", number), "step", MINI_BATCH, size.targets)
        else:
            self._hold(("gradient", cell + 1, number), "wire", MESSAGES, size.output_gradients)

    def _post(self, instruction: Instruction) -> bool:
        """Counts a receive that the engine posts ahead."""
        if self._copied:
            return True
        op, cell, number = instruction.op, instruction.cell, instruction.micro_batch
        bytes_ = self._sizes[cell].message if op is Op.RECEIVE_ACTIVATION else self._sizes[cell].output_gradients
        self._hold(("posted", op, cell, number), "wire", MESSAGES, bytes_)
        return True

    def _let_go(self, cell: int, number: int) -> None:
        """Drops what a micro-batch needed in this cell: its graph, its input, the gradient of its output."""
        self._drop(("graph", cell, number), "graph")
        self._drop(("put off", cell, number), "graph")
        self._drop(("gradient", cell, number), "input")
        self._drop(("boundary", cell, number), "graph")
        self._drop(("boundary", cell - 1, number), "input")
        self._drop(("received", cell, number), "input")
        self._drop(("gradient", cell + 1, number), "wire")
        if cell == 0:
            self._drop(("gradient", 0, number), "wire")

    def _run(self, running: int) -> None:
        self._now[RUNNING] = running
        self._note()
        self._now[RUNNING] = 0

    def _note(self) -> None:
        total = sum(self._now.values())
        if total > self._peak:
            self._peak, self._at_peak = total, dict(self._now)

    def _hold(self, key: tuple[object, ...], holder: str, kind: str, size: int) -> None:
        """Counts memory that lives as long as it has a holder; the first one decides the kind."""
        if key not in self._held:
            self._held[key] = kind, size, set()
            self._now[kind] += size
            self._note()
        self._held[key][2].add(holder)

    def _drop(self, key: tuple[object, ...], holder: str) -> None:
        kind, size, holders = self._held.get(key, ("", 0, set()))
        if holders == {holder}:
            del self._held[key]
            self._now[kind] -= size
        holders.discard(holder)
