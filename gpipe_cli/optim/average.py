"""Defines the moving average of weights and BatchNorm statistics for evaluation (paper, section 4: as Real et al.)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..checkpoint.layer_state import named_tensors, require_match
from ..pipeline.cell import Cell


class WeightAverage:
    """Averages the weights of one worker's layers, on their device.

    After update t, counted from 0 without skipped ones, average ← average + (1 − d) · (weight − average) with
    d = min(decay, (1 + t) / (10 + t)), as in TensorFlow: the average follows fast at first. It begins with the weights
    at its construction. Parameters and persistent buffers of floating-point types are averaged; others (BatchNorm's
    counters) are not.

    Args:
        cells: cells of the worker.
        decay: upper limit of d; below 1.
    """

    def __init__(self, cells: Sequence[Cell], decay: float) -> None:
        self._decay = decay
        self._live: list[Tensor] = []  # the layers' own weights and buffers
        self._averages: list[Tensor] = []  # the average of each
        self._places: dict[str, dict[str, int]] = {}  # by layer, then name: the index in both lists
        self._of_cells: list[tuple[Cell, slice]] = []  # each cell's indices in both lists
        known: dict[int, int] = {}  # id of a tensor -> its index: a tensor with two names is averaged once
        for cell in cells:
            first = len(self._live)
            for layer in cell.layers:
                places = self._places[layer.name] = {}
                for name, tensor in averaged_tensors(layer.module).items():
                    if name in layer.tied:
                        continue
                    places[name] = known.setdefault(id(tensor), len(known))
                    if places[name] == len(self._live):
                        self._live.append(tensor)
                        self._averages.append(tensor.detach().clone())
            if cell.state is not None:
                self._averages[first:] = cell.state.averages(self._averages[first:])
                cell.take_away()
            self._of_cells.append((cell, slice(first, len(self._live))))

    def of(self, layer: str) -> dict[str, Tensor]:
        """Returns the averages of one layer, by the names of its weights and buffers."""
        return {name: self._averages[place] for name, place in self._places[layer].items()}

    @torch.no_grad()
    def update(self, t: int) -> None:
        """Moves the averages towards the present weights, after update number ``t``."""
        decay = min(self._decay, (1 + t) / (10 + t))
        for cell, own in self._of_cells:
            if live := self._live[own]:
                torch._foreach_lerp_(self._averages[own], live, 1 - decay)
            cell.take_away()

    @torch.no_grad()
    def restore(self, layer: str, saved: Mapping[str, Tensor]) -> None:
        """Continues from ``saved`` averages or, if there are none, from the layer's present weights.

        Raises:
            CheckpointError: names, shapes or types differ.
        """
        if saved:
            require_match(layer, "average", self.of(layer), saved)
        for name, place in self._places[layer].items():
            self._averages[place].copy_(saved[name] if saved else self._live[place])

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Exchanges weights and averages while the context lasts; afterwards the weights are back, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Swaps the tensors' memory: exact, quick, and without a third copy of the model."""
        for place, live in enumerate(self._live):
            live.data, self._averages[place] = self._averages[place], live.data


def averaged_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and persistent buffers of floating-point types, under all their names."""
    parameters, buffers = named_tensors(module)
    return {name: tensor for name, tensor in {**parameters, **buffers}.items() if tensor.is_floating_point()}
