"""Adds up the sizes and the work of a cell from those of its layers.

Memory that two layers keep (the output of one is the input of the next) counts once, so a cell is more than a sum: its
layers are walked through with the storages that they keep.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..layers import own_name
from ..partition.cut import Cut
from ..partition.fake_layers import TensorShape
from ..pipeline.messages.boundary import ALIGNMENT
from ..pipeline.tied_parameters import Use
from .measure.layer_facts import BoundaryTensor, LayerFacts, ModelFacts
from .memory import CellSizes


@dataclass(frozen=True)
class CellFacts:
    """Describes one cell.

    Attributes:
        worker: its number.
        first, last: numbers of its layers in the model's list.
        layers: their facts; in the last cell followed by those of the task's loss.
        weights: its parameters; of tied ones those that it owns.
        trained: its parameters that learn, by full name; likewise.
        copies: values of parameters that another worker owns.
        uses: tied parameters that learn and that another layer owns: each has a gradient here.
        sizes: bytes of one micro-batch.
        inputs_bytes: bytes of the boundary in front of it, for one micro-batch.
    """

    worker: int
    first: int
    last: int
    layers: tuple[LayerFacts, ...]
    weights: tuple[TensorShape, ...]
    trained: tuple[tuple[str, TensorShape], ...]
    copies: tuple[TensorShape, ...]
    uses: tuple[TensorShape, ...]
    sizes: CellSizes
    inputs_bytes: int

    @property
    def parameters(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of weights and buffers, such as BatchNorm's moving averages."""
        return _bytes(self.weights) + _bytes(self.copies) + sum(layer.buffer_bytes for layer in self.layers)

    @property
    def average_bytes(self) -> int:
        """Returns the bytes of their moving averages (`trainer.average`)."""
        return _bytes(self.weights) + sum(layer.averaged_buffer_bytes for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        return _bytes([shape for _, shape in self.trained]) + _bytes(self.uses)

    @property
    def tied_bytes(self) -> int:
        """Returns those of weights and gradients that another cell has too."""
        return _bytes(self.copies) + _bytes(self.uses)


def _bytes(shapes: Sequence[TensorShape]) -> int:
    return sum(shape.bytes for shape in shapes)


def build_cells(model: ModelFacts, cut: Cut, names: Sequence[str]) -> Iterator[CellFacts]:
    """Yields the facts of every cell; ``names``: of the layers."""
    cells, copied = cut.layers, copied_parameters(cut.uses(names))
    for members, worker in zip(cells, cut.placement, strict=True):
        layers = model.layers[members.start : members.stop]
        if is_last := members is cells[-1]:
            layers = model.with_loss[members.start :]
        boundary = model.layers[members.start - 1].boundary if members.start else model.inputs
        parameters = [
            (names[index], name, shape, name in layer.frozen, name in cut.ties[index])
            for index, layer in zip(members, layers, strict=False)
            for name, shape in layer.parameters
        ]
        yield CellFacts(
            worker=worker,
            first=members.start,
            last=members.stop - 1,
            layers=tuple(layers),
            weights=tuple(shape for _, _, shape, _, tied in parameters if not tied),
            trained=tuple(
                (own_name(layer, name), shape)
                for layer, name, shape, frozen, tied in parameters
                if not tied and not frozen
            ),
            copies=tuple(shape for layer, name, shape, _, _ in parameters if f"{layer}.{name}" in copied),
            uses=tuple(shape for _, _, shape, frozen, tied in parameters if tied and not frozen),
            sizes=cell_sizes(layers, boundary, model.target_bytes, is_last),
            inputs_bytes=sum(tensor.bytes for tensor in boundary),
        )


def copied_parameters(ties: Sequence[Sequence[Use]]) -> set[str]:
    """Returns the uses for which a worker keeps a value: its first of each parameter that another worker owns."""
    firsts = [{use.worker: use.name for use in reversed(uses)} for uses in ties]
    owners = {owner.name for owner, *_ in ties}
    return {name for first in firsts for name in first.values()} - owners


def tie_messages(
    ties: Sequence[Sequence[Use]], names: Sequence[str], layers: Sequence[LayerFacts]
) -> Iterator[tuple[int, int, int]]:
    """Yields sender, receiver and bytes of every message of a step: gradients to the owners, values back.

    Args:
        names: of the layers.
    """
    trained = {
        f"{layer}.{name}": shape.bytes
        for layer, facts in zip(names, layers, strict=True)
        for name, shape in facts.parameters
        if name not in facts.frozen
    }
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
    layers: Sequence[LayerFacts], inputs: Sequence[BoundaryTensor], target_bytes: Sequence[int], is_last: bool
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
    outputs = () if is_last else layers[-1].boundary
    own_outputs = 0 if is_last else walk.handed_on()
    if not is_last:
        walk.keep_outputs()
    gradients_out = sum(tensor.bytes for tensor in outputs if tensor.needs_gradient)
    total = walk.kept_bytes
    backward = max(0, backward - total - gradients_out)
    put_off = first_half = second_half = 0
    if any(tensor.needs_gradient for tensor in inputs):  # otherwise nothing is put off
        put_off, first_half, second_half = _halves(layers, kept)
    return CellSizes(
        gathered=sum(layer.gathered for layer in layers),
        casts=sum(layer.casts for layer in layers),
        message=_packed([*(tensor.bytes for tensor in inputs), *target_bytes]),
        sent=0 if is_last else _packed([*(tensor.bytes for tensor in outputs), *target_bytes]),
        targets=sum(target_bytes),
        graph=total - own_outputs,
        outputs=own_outputs,
        input_gradients=_packed([tensor.bytes for tensor in inputs if tensor.needs_gradient]),
        output_gradients=_packed([tensor.bytes for tensor in outputs if tensor.needs_gradient]),
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

    def __init__(self, inputs: Sequence[BoundaryTensor]) -> None:
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
        for output in layer.outputs:
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
