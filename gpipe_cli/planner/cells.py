"""Adds up the sizes and the work of a cell from those of its layers.

Memory that two layers keep (the output of one is the input of the next) counts once, so a cell is more than a sum: its
layers are walked through with the storages that they keep.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..partition.cost import LayerTimes
from ..partition.fake_layers import TensorShape
from ..pipeline.messages.boundary import ALIGNMENT
from ..pipeline.tied_parameters import Use
from .kept import KeptBytes, copied_parameters
from .measure.layer_facts import LayerFacts, ModelFacts
from .memory import CellSizes


@dataclass(frozen=True)
class CellPlan(KeptBytes):
    """Describes one cell. Sizes are bytes; seconds are those of one micro-batch on its own worker.

    Attributes:
        cell, worker: their numbers.
        first, last: names of its first and last layer.
        start: number of its first layer in the model's list.
        layers: number of its layers.
        parameters: number of its parameters, tied ones where their owner is.
        share: its share of all cells' time.
        seconds: seconds of each pass.
        sizes: bytes of one micro-batch.
        inputs_in_flight: most micro-batches whose input is kept at once.
        inputs: all boundary inputs in flight.
        working: what graphs in flight and running operations hold beside them; with re-materialization, its peak.
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
    def members(self) -> range:
        """Returns the numbers of its layers."""
        return range(self.start, self.start + self.layers)

    @property
    def graph(self) -> int:
        """Returns what the graph of one micro-batch holds, its outputs included."""
        return self.sizes.graph + self.sizes.outputs

    @property
    def total(self) -> float:
        """Returns the sum of all bytes; peaks of cells that share a worker do not add up."""
        return self.kept + self.inputs + self.working


def sizes_of_cell(model: ModelFacts, members: range) -> CellSizes:
    """Returns the bytes of one micro-batch in a cell of these layers; the last cell has the loss, too."""
    is_last = members.stop == len(model.layers)
    layers = model.with_loss[members.start :] if is_last else model.layers[members.start : members.stop]
    inputs = model.layers[members.start - 1].outputs if members.start else model.inputs
    return cell_sizes(layers, inputs, model.target_bytes, is_last)


def tie_messages(ties: Sequence[Sequence[Use]], model: ModelFacts) -> Iterator[tuple[int, int, int]]:
    """Yields sender, receiver and bytes of every message of a step: gradients to the owners, values back."""
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
    """Returns for each layer the bytes that it makes and that any cell with it keeps; the loss's are the last layer's.

    What a later cell needs of it stays, too: a cell keeps what it hands on.
    """
    walk = _Storages(model.inputs)
    made = [len(model.inputs)]
    for facts in model.with_loss:
        walk.enter(facts)
        made.append(walk.storages)
    made[len(model.layers) :] = made[-1:]
    return [walk.kept_among(range(*numbers)) for numbers in pairwise(made)]


def cell_sizes(
    layers: Sequence[LayerFacts], inputs: Sequence[TensorShape], target_bytes: Sequence[int], is_last: bool
) -> CellSizes:
    """Returns the bytes of one micro-batch in a cell of these layers; the last of the last cell is the loss."""
    walk = _Storages(inputs)
    inference = forward = backward = 0
    kept = []
    for layer in layers:
        inference = max(inference, walk.handed_on() + layer.inference.peak)
        forward = max(forward, walk.kept_bytes + walk.handed_on(kept=False) + layer.forward.peak)
        walk.enter(layer)
        backward = max(backward, walk.kept_bytes + layer.backward_extra)
        kept.append(walk.kept_bytes)
    outputs = () if is_last else layers[-1].outputs
    own_outputs = 0 if is_last else walk.handed_on()
    if not is_last:
        walk.keep_outputs()
    gradients_out = sum(tensor.bytes for tensor in outputs if tensor.requires_grad)
    total = walk.kept_bytes
    backward = max(0, backward - total - gradients_out)
    put_off = first_half = second_half = 0
    if any(tensor.requires_grad for tensor in inputs):  # otherwise nothing is put off
        put_off, first_half, second_half = _halves(layers, kept)
    return CellSizes(
        gathered=sum(layer.gathered for layer in layers),
        casts=sum(layer.casts for layer in layers),
        message=_packed([*(tensor.bytes for tensor in inputs), *target_bytes]),
        sent=0 if is_last else _packed([*(tensor.bytes for tensor in outputs), *target_bytes]),
        targets=sum(target_bytes),
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
    """Returns bytes of a backward in two halves: held between them, and alive at most in the first, in the second.

    The last two do not count what was there before.

    Args:
        kept: bytes kept by the graphs of the layers up to each.
    """
    noted = first = graph = 0
    for layer, kept_up_to_it in zip(reversed(layers), reversed(kept), strict=True):
        first = max(first, noted + layer.halves.first.peak)
        noted += layer.halves.noted
        if layer.halves.waits:
            graph = max(graph, kept_up_to_it)  # the graph behind the last weight is dropped
    return graph + noted, first, max(layer.halves.second.peak for layer in layers)


def _packed(sizes: Sequence[int]) -> int:
    """Returns the bytes of tensors that travel in one message (`BoundarySpec.offsets`)."""
    if len(sizes) == 1:
        return sizes[0]
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


class _Storages:
    """Follows the memory of a cell while its layers run one after the other; the cell's own inputs never count."""

    def __init__(self, inputs: Sequence[TensorShape]) -> None:
        self._size: list[int] = []  # of each storage, by its number
        self._kept: set[int] = set()
        self._boundary = [self._new(0) for _ in inputs]
        self.kept_bytes = 0

    @property
    def storages(self) -> int:
        """Returns how many there have been; they are numbered in order."""
        return len(self._size)

    def kept_among(self, numbers: Sequence[int]) -> int:
        """Returns the bytes of those among some storages that graphs keep."""
        return sum(self._size[number] for number in numbers if number in self._kept)

    def enter(self, layer: LayerFacts) -> None:
        """Adds the tensors that the graph of a layer keeps, and goes on to its outputs."""
        before = self._boundary
        if layer.saves_inside:
            self._keep(self._new(layer.saves_inside))
        for number in layer.saves_inputs:
            self._keep(before[number])
        own: dict[int, int] = {}
        self._boundary = []
        for output in layer.memory:
            if output.of_input is None and output.storage not in own:
                own[output.storage] = self._new(output.bytes)
            self._boundary.append(own[output.storage] if output.of_input is None else before[output.of_input])
        for number in layer.saves_outputs:
            self._keep(own[number])

    def handed_on(self, kept: bool = True) -> int:
        """Returns the bytes of the next layer's inputs; without ``kept`` only those that no graph keeps."""
        return sum(self._size[storage] for storage in set(self._boundary) if kept or storage not in self._kept)

    def keep_outputs(self) -> None:
        """Keeps the cell's outputs, because the engine needs them as the roots of its backward."""
        for storage in set(self._boundary):
            self._keep(storage)

    def _new(self, size: int) -> int:
        self._size.append(size)
        return len(self._size) - 1

    def _keep(self, storage: int) -> None:
        if storage not in self._kept:
            self._kept.add(storage)
            self.kept_bytes += self._size[storage]
