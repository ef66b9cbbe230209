"""Adds up the bytes that a worker holds at the worst moment of a step, from its list of instructions, without tensors.

The list is the one that the engine runs. A boundary lives from its forward to the last computation of its micro-batch
in the cell behind it, a graph from the run that built it to the last computation of its cell, a gradient until it is
used or sent. Messages on their way count as if there were always as many as there may be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..pipeline.messages.shared_memory import slot_bytes
from ..schedule.instruction import Instruction, Op, send_window
from ..schedule.posting import RECEIVES_AHEAD

PROCESS = 0.5e9  # bytes of a process on a CPU beside its tensors: Python, torch, their libraries, what kernels need
KINDS = ("mini_batch", "inputs", "graphs", "messages", "shared", "running")


@dataclass(frozen=True)
class CellSizes:
    """Holds the bytes of one micro-batch in one cell.

    Attributes:
        gathered: BatchNorm's statistics, kept until the mini-batch has ended.
        casts: weights that autocast uses in half precision, kept as long, once for all micro-batches.
        message: the message from the cell before: all tensors in front of the cell, and the targets.
        sent: the message to the cell behind; 0 for the last.
        targets: targets of the micro-batch.
        inputs: the tensors in front of the cell.
        graph: tensors that forward keeps for backward, without inputs and outputs.
        outputs: the cell's outputs, as far as they are memory of its own; 0 for the last, whose only the loss reads.
        input_gradients: gradients that it sends back to the cell before.
        output_gradients: gradients that it gets from the cell behind.
        inference: most bytes alive beside all this while it runs without a graph.
        forward: most bytes alive while it runs with a graph, that graph included.
        backward: most bytes alive in backward, without graph and gradients.
        put_off: left by the first half of a backward to the second: graph and noted gradients; 0 where nothing is left.
        input_half: most bytes alive in the first half, without graph and gradients.
        weight_half: most bytes alive in the second half, without what was put off.
    """

    gathered: int
    casts: int
    message: int
    sent: int
    targets: int
    inputs: int
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

    def working(self, graphs: int, halves: bool) -> int:
        """Returns the most bytes that graphs, and the operations of the one at work, hold.

        Args:
            graphs: number of graphs, the one at work included.
            halves: True if the backward runs in two halves.
        """
        graph = self.graph + self.outputs
        if not (halves and self.put_off):
            return (graphs - 1) * graph + max(self.forward, graph + self.backward)
        most = max(self.forward, graph + self.input_half, self.put_off + self.weight_half)
        return (graphs - 1) * max(graph, self.put_off) + most

    @property
    def by_message(self) -> dict[Op, int]:
        """Returns the bytes of each kind of message that the cell sends and receives."""
        sent = {Op.SEND_ACTIVATION: self.sent, Op.SEND_GRADIENT: self.input_gradients}
        return sent | {Op.RECEIVE_ACTIVATION: self.message, Op.RECEIVE_GRADIENT: self.output_gradients}


def most_alive(
    instructions: Sequence[Instruction], sizes: Sequence[CellSizes], placement: Sequence[int], on_cpus: bool
) -> dict[str, int]:
    """Returns the bytes at the worst moment of a worker's training step, without those of the model.

    They are given by kind (`KINDS`): what stays for the whole mini-batch, boundary inputs, graphs, messages and
    gradients on their way, memory shared with the receivers of messages, and what a running operation needs.

    Args:
        instructions: the worker's list.
        sizes: sizes of every cell of the model.
        placement: ``placement[cell]`` is the cell's worker.
        on_cpus: messages travel through shared memory; else from GPU to GPU.
    """
    M, largest = 1 + max((i.micro_batch for i in instructions), default=-1), dict[Op, int]()
    for i in instructions:
        largest[i.op] = max(largest.get(i.op, 0), sizes[i.cell].by_message.get(i.op, 0))
    messages = messages_held(largest, M, len(set(placement)), on_cpus)
    held = _Held({"mini_batch": _of_mini_batch({i.cell for i in instructions}, sizes, M), **messages})
    recomputed = {(i.cell, i.micro_batch) for i in instructions if i.op is Op.RECOMPUTE}
    for i in instructions:
        size, place, behind = sizes[i.cell], (i.cell, i.micro_batch), (i.cell + 1, i.micro_batch)
        next_is_here = i.cell + 1 < len(placement) and placement[i.cell] == placement[i.cell + 1]
        if i.op is Op.RECEIVE_ACTIVATION:
            apart = size.targets if on_cpus else 0  # counted under "mini_batch"; on a GPU the message keeps them, too
            held.add("inputs", place, size.message - apart)
        elif i.op is Op.RECEIVE_GRADIENT:
            held.add("messages", behind, size.output_gradients)
        elif i.op is Op.FORWARD:
            keeps = place not in recomputed
            held.run(size.forward if keeps else size.inference)
            if keeps:
                held.add("graphs", place, size.graph + size.outputs)
            elif next_is_here:  # with a graph the outputs count under "graphs"
                held.add("inputs", behind, size.outputs)
        elif i.op is Op.RECOMPUTE:
            held.run(size.forward)
            held.add("graphs", place, size.graph + size.outputs)
        elif i.op is Op.BACKWARD or (i.op is Op.INPUT_GRADIENT and not size.put_off):
            held.run(size.backward)
            held.drop(("graphs", place), ("inputs", place), ("messages", behind))
            held.add("messages", place, size.input_gradients)
        elif i.op is Op.INPUT_GRADIENT:  # the input and its gradient stay; of the graph what the second half needs
            held.run(size.input_half)
            held.drop(("graphs", place), ("messages", behind))
            held.add("messages", place, size.input_gradients)
            held.add("graphs", place, size.put_off + size.input_gradients)
        elif i.op is Op.WEIGHT_GRADIENT and size.put_off:
            held.run(size.weight_half)
            held.drop(("graphs", place), ("inputs", place))
        elif i.op is Op.SEND_GRADIENT:
            held.drop(("messages", place))
    return held.at_peak


def _of_mini_batch(cells: set[int], sizes: Sequence[CellSizes], M: int) -> int:
    """Returns the bytes that a worker with these cells holds for the whole mini-batch.

    They are weights cast for autocast, BatchNorm's statistics and targets; on the first worker all micro-batches.
    """
    kept = sum(sizes[cell].casts + M * sizes[cell].gathered for cell in cells)
    return kept + M * (sizes[0].message if 0 in cells else max((sizes[cell].targets for cell in cells), default=0))


def messages_held(largest: Mapping[Op, int], M: int, workers: int, on_cpus: bool) -> dict[str, int]:
    """Returns by kind the bytes of messages that are sent but not taken yet, or awaited and not here yet.

    On CPUs an early worker is ahead by as many activations as the window has. They lie in slots that stay from step to
    step. Gradients are taken soon, because the worker in front waits for them. A GPU keeps one message until its
    receiver is ready.

    Args:
        largest: bytes of the largest message of each kind of send and receive.
        M: number of messages of each kind.
    """
    activation, gradient = largest.get(Op.SEND_ACTIVATION, 0), largest.get(Op.SEND_GRADIENT, 0)
    if on_cpus:
        slots = min(M, send_window(workers)) * slot_bytes(activation) + min(M, 2) * slot_bytes(gradient)
        return {"messages": 0, "shared": slots}
    awaited = largest.get(Op.RECEIVE_ACTIVATION, 0) + largest.get(Op.RECEIVE_GRADIENT, 0)
    return {"messages": min(M, 1) * (activation + gradient) + min(M, RECEIVES_AHEAD) * awaited, "shared": 0}


class _Held:
    """Adds up the bytes in memory, and keeps the worst moment.

    Attributes:
        at_peak: bytes by kind at the worst moment.
    """

    def __init__(self, always: dict[str, int]) -> None:
        self._parts: dict[tuple[str, tuple[int, int]], int] = {}
        self._now = dict.fromkeys(KINDS, 0) | always
        self.at_peak = dict(self._now)

    def add(self, kind: str, place: tuple[int, int], size: int) -> None:
        """Adds bytes of a kind that belong to ``place``, a (cell, micro-batch)."""
        self._parts[kind, place] = size
        self._now[kind] += size
        self.run(0)  # this may be the worst moment, even if nothing runs

    def drop(self, *parts: tuple[str, tuple[int, int]]) -> None:
        """Takes away what was added for each (kind, place)."""
        for part in parts:
            self._now[part[0]] -= self._parts.pop(part, 0)

    def run(self, running: int) -> None:
        """Notes a moment in which an operation needs ``running`` bytes beside those that are held."""
        if sum(self._now.values()) + running > sum(self.at_peak.values()):
            self.at_peak = self._now | {"running": running}
