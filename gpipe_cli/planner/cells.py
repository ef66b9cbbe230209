"""Adds up the sizes and the work of a cell from those of its layers.

Memory that two layers keep (the output of one is the input of the next) counts once, so a cell is more than a sum: its
layers are walked through with the storages that they keep.

An operation takes the longer of two times: its FLOPs at the device's rate, or its bytes at the memory's rate. A real
run reaches a share of both rates (`plan.efficiency`), and every operation costs its start.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

from ..config import PipelineConfig
from ..partition.cost import LayerTimes, total_times, with_loss
from ..partition.fake_layers import TensorShape
from ..partition.tracking import Operation
from ..pipeline.messages.boundary import ALIGNMENT
from ..pipeline.tied_parameters import Use
from .kept import KeptBytes, copied_parameters
from .measure.layer_facts import LayerFacts, ModelFacts
from .memory import CellSizes
from .options import Device


@dataclass(frozen=True)
class CellPlan(KeptBytes):
    """Describes one cell. Sizes are bytes; seconds are those of one micro-batch on its own worker.

    Attributes:
        cell, worker: numbers of the cell and of its worker.
        first, last: names of its first and last layer.
        start: number of its first layer in the model's list.
        layers: number of its layers.
        parameters: number of its parameters, tied ones where their owner is.
        share: its share of all cells' time.
        seconds: seconds of each pass (forward, backward, …).
        sizes: bytes of one micro-batch.
        inputs_in_flight: most micro-batches whose input is kept at once.
        inputs: bytes of all boundary inputs in flight.
        working: most bytes that graphs and running operations hold beside them.
    """

    cell: int
    worker: int
    first: str
    last: str
    start: int
    layers: int
    parameters: int
    share: float
    seconds: LayerTimes
    sizes: CellSizes
    inputs_in_flight: int
    inputs: int
    working: int

    @property
    def graph(self) -> int:
        """Returns the bytes that the graph of one micro-batch holds, its outputs included."""
        return self.sizes.graph + self.sizes.outputs

    @property
    def total(self) -> float:
        """Returns the sum of all bytes of the cell. A worker with several cells needs less than the sum of theirs."""
        return self.kept + self.inputs + self.working


def tie_messages(ties: Sequence[Sequence[Use]], model: ModelFacts) -> Iterator[tuple[int, int, int]]:
    """Yields (sender, receiver, bytes) of every message for tied parameters in a step.

    Gradients go to the owner of each parameter, and its new value comes back.
    """
    layers = zip(model.names, model.own, strict=True)
    trained = {f"{layer}.{one.name}": one.form.bytes for layer, own in layers for one in own if one.form.requires_grad}
    copied = copied_parameters(ties)
    for owner, *others in ties:
        size = trained.get(owner.name, 0)
        for use in others:
            if use.worker != owner.worker:
                yield use.worker, owner.worker, size
            if use.name in copied:
                yield owner.worker, use.worker, size


def graphs_of_layers(model: ModelFacts) -> list[int]:
    """Returns for each layer the bytes of its new storages that any cell with the layer keeps for backward.

    Those that only a later layer saves count, too, because a cell keeps what it hands on. Those of the loss count for
    the last layer.
    """
    walk = _Storages(model.inputs)
    made = [len(model.inputs)]
    for facts in model.with_loss:
        walk.enter(facts)
        made.append(len(walk.sizes))
    made[len(model.layers) :] = made[-1:]
    return [sum(walk.sizes[number] for number in walk.kept & {*range(*numbers)}) for numbers in pairwise(made)]


def sizes_of_cell(model: ModelFacts, members: range) -> CellSizes:
    """Returns the bytes of one micro-batch in a cell of these layers; the last cell has the loss, too.

    Args:
        members: indices of the layers.
    """
    is_last = members.stop == len(model.layers)
    layers = model.with_loss[members.start :] if is_last else model.layers[members.start : members.stop]
    inputs = model.layers[members.start - 1].outputs if members.start else model.inputs
    outputs = () if is_last else layers[-1].outputs
    walk = _Storages(inputs)
    inference = forward = backward = 0
    kept = []
    for layer in layers:
        inference = max(inference, walk.handed_on() + layer.peaks["inference"])
        forward = max(forward, walk.kept_bytes + walk.handed_on(kept=False) + layer.peaks["forward"])
        walk.enter(layer)
        backward = max(backward, walk.kept_bytes + layer.peaks["backward"])
        kept.append(walk.kept_bytes)
    own_outputs = 0 if is_last else walk.keep_outputs()
    gradients_out = sum(tensor.bytes for tensor in outputs if tensor.requires_grad)
    total = walk.kept_bytes
    backward = max(0, backward - total - gradients_out)
    put_off = first_half = second_half = 0
    if any(tensor.requires_grad for tensor in inputs):  # otherwise nothing is put off
        put_off, first_half, second_half = _halves(layers, kept)
    return CellSizes(
        gathered=sum(layer.gathered for layer in layers),
        casts=sum(layer.casts for layer in layers),
        message=_packed([*(tensor.bytes for tensor in inputs), *model.target_bytes]),
        sent=0 if is_last else _packed([*(tensor.bytes for tensor in outputs), *model.target_bytes]),
        targets=sum(model.target_bytes),
        inputs=sum(tensor.bytes for tensor in inputs),
        graph=total - own_outputs,
        outputs=own_outputs,
        input_gradients=_packed([tensor.bytes for tensor in inputs if tensor.requires_grad]),
        output_gradients=_packed([tensor.bytes for tensor in outputs if tensor.requires_grad]),
        inference=inference,
        forward=max(forward, total),
        backward=backward,
        put_off=put_off,
        input_half=max(0, first_half - gradients_out) if put_off else backward,
        weight_half=second_half,
    )


def _halves(layers: Sequence[LayerFacts], kept: Sequence[int]) -> tuple[int, int, int]:
    """Returns the bytes of a backward in two halves.

    Args:
        layers: the cell's layers.
        kept: bytes kept by the graphs of all layers up to each one.

    Returns:
        (bytes held between the halves, most bytes alive in the first, most in the second). The last two do not count
        what was there before.
    """
    noted = first = graph = 0
    for layer, kept_up_to_it in zip(reversed(layers), reversed(kept), strict=True):
        first = max(first, noted + layer.peaks["input_gradient"])
        noted += layer.noted
        if layer.operations["weight_gradient"]:
            graph = max(graph, kept_up_to_it)  # the graph behind the last weight is dropped
    return graph + noted, first, max(layer.peaks["weight_gradient"] for layer in layers)


def _packed(sizes: Sequence[int]) -> int:
    """Returns the bytes of tensors that travel in one message (`BoundarySpec.offsets`)."""
    if len(sizes) == 1:
        return sizes[0]
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


class _Storages:
    """Follows the memory of a cell while its layers run one after the other; the cell's own inputs never count.

    A storage is memory that one or more tensors share; they are numbered.

    Attributes:
        sizes: bytes of each storage.
        kept: numbers of the storages that graphs keep.
        kept_bytes: bytes of these together.
    """

    def __init__(self, inputs: Sequence[TensorShape]) -> None:
        self.sizes: list[int] = []
        self.kept: set[int] = set()
        self._boundary = [self._new(0) for _ in inputs]
        self.kept_bytes = 0

    def enter(self, layer: LayerFacts) -> None:
        """Adds the storages of the next layer, keeps those that its graph keeps, and goes on to its outputs."""
        self._keep(self._new(layer.saved_inside))
        here = [*self._boundary, *map(self._new, layer.new_storages)]
        self._boundary = [here[number] for number in layer.output_storages]
        for number in layer.saved_storages:
            self._keep(here[number])

    def handed_on(self, kept: bool = True) -> int:
        """Returns the bytes of the next layer's inputs.

        Args:
            kept: False to count only those that no graph keeps.
        """
        return sum(self.sizes[storage] for storage in set(self._boundary) if kept or storage not in self.kept)

    def keep_outputs(self) -> int:
        """Keeps the cell's outputs, because the engine needs them as the roots of its backward; returns their bytes."""
        for storage in self._boundary:
            self._keep(storage)
        return self.handed_on()

    def _new(self, size: int) -> int:
        """Adds a storage of this many bytes; returns its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _keep(self, storage: int) -> None:
        """Notes that a graph keeps the storage."""
        if storage not in self.kept:
            self.kept.add(storage)
            self.kept_bytes += self.sizes[storage]


# -- times -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeModel:
    """Computes the seconds of layers and updates on one device; layers that were timed have their own.

    Attributes:
        device: the device, with the rates that a run reaches.
        measured: times of the layers that were timed, and of those computed already.
    """

    device: Device
    measured: dict[LayerFacts, LayerTimes] = field(default_factory=dict)

    def layer(self, facts: LayerFacts) -> LayerTimes:
        """Returns the seconds of one layer, measured or computed from its operations."""
        if facts not in self.measured:
            seconds = {name: self.seconds(operations) for name, operations in facts.operations.items()}
            self.measured[facts] = LayerTimes(**seconds)
        return self.measured[facts]

    def layers(self, model: ModelFacts) -> list[LayerTimes]:
        """Returns the times of each layer; those of the loss are added to the last."""
        return with_loss(list(map(self.layer, model.layers)), None if model.loss is None else self.layer(model.loss))

    def seconds(self, operations: Iterable[Operation]) -> float:
        """Returns the seconds of some operations that run one after the other.

        Each takes the longer of its FLOPs at the device's rate and its bytes at the memory's, and its start.
        """
        device, total = self.device, 0.0
        for flops, moved, half in operations:
            rate = device.half_flops if half else device.flops
            total += max(flops / rate, moved / device.bandwidth) + device.overhead
        return total

    def update(self, cell: KeptBytes, tensors: int) -> float:
        """Returns the seconds of the optimizer's step for a cell.

        Weights, gradients and state are read, weights and state written.

        Args:
            tensors: number of the cell's parameters that learn.
        """
        moved = 3 * cell.gradients + 2 * cell.optimizer
        return moved / self.device.bandwidth + tensors * self.device.overhead


def cell_times(layers: Sequence[LayerTimes], sizes: CellSizes) -> LayerTimes:
    """Returns the times of a cell of these layers; where nothing is put off, the first half is the whole backward."""
    total = total_times(layers)
    return total if sizes.put_off else replace(total, input_gradient=total.backward, weight_gradient=0.0)


class Links:
    """Computes the seconds of messages between workers, and of sums over replicas, which may lie on several nodes.

    Args:
        device: the device, with the speeds of its links.
        pipeline: has the numbers of workers and replicas, and which of them lie in one node.
        node: devices in a node; None: all are in one.
    """

    def __init__(self, device: Device, pipeline: PipelineConfig, node: int | None) -> None:
        self._device, self._replicas = device, range(pipeline.replicas)
        ranks = [*product(self._replicas, range(pipeline.worker_count))]
        if pipeline.placement == "replicas_inside":
            ranks.sort(key=lambda rank: rank[1])
        size = node or len(ranks)
        self._node_of = {rank: place // size for place, rank in enumerate(ranks)}
        # A node's replicas send at the same time, and so do its workers: each has its part of the way to other nodes.
        replicas, workers = map(set, zip(*ranks[:size], strict=True))
        self._sending, self._summing = len(replicas), len(workers)

    def transfer(self, size: float, sender: int, receiver: int) -> float:
        """Returns the seconds that a message of ``size`` bytes takes from a worker to another."""
        apart = any(self._node_of[r, sender] != self._node_of[r, receiver] for r in self._replicas)
        return self._device.latency + size / self._speed(apart, self._sending) if size else 0.0

    def reduction(self, size: float, worker: int) -> float:
        """Returns the seconds of summing ``size`` bytes of a worker's gradients over the replicas, around a ring."""
        apart, D = len({self._node_of[r, worker] for r in self._replicas}) > 1, len(self._replicas)
        return 2 * (D - 1) / D * size / self._speed(apart, self._summing)

    def _speed(self, apart: bool, sharing: int) -> float:
        """Returns bytes/s: inside a node, or to another node if so many send at the same time."""
        return min(self._device.link, self._device.between / sharing) if apart else self._device.link
