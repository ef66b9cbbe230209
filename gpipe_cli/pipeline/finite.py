"""Finds the layer that first gives a value that is not finite (NaN or infinite), in a step that runs again for it.

A step draws the same random numbers whenever it runs and changes no weight, so a second run gives the same values.
Steps that are finite pay nothing. Every layer gets aliases of its inputs: the gradient of such an alias is what this
layer alone passes back, also where a tensor is used by several layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..micro_batch import Loss, Tensors
from ..position import Position
from .cell import BuiltLayer, Call
from .messages.grouping import as_tensors, replace_tensors

FORWARD, BACKWARD = 0, 1
DATA, LOSS = -1, 1 << 40  # before the first layer, behind the last


class Origin(NamedTuple):
    """Describes a value that is not finite, in plain values; the first four order such values, the cause first.

    Attributes:
        way: FORWARD or BACKWARD.
        place: in the order in which a micro-batch passes: index of the layer, DATA or LOSS; in backward negative.
        cell, layer: number and name; None for the data and the task's loss.
        what: what is not finite: "output", "gradient of weight".
        value: "nan" or "inf".
        weight: name of a weight of the layer that was not finite before the step.
    """

    way: int
    replica: int
    micro_batch: int
    place: int
    cell: int | None
    layer: str | None
    what: str
    value: str
    weight: str | None = None

    @property
    def order(self) -> tuple[int, ...]:
        return self[:4]


class FiniteWatch:
    """Looks at every output and gradient of a worker's layers while a step runs.

    Args:
        replica: of the worker.
        where: the micro-batch that runs, kept up to date by the engine.

    Attributes:
        first: what was found first, in the order of `Origin`.
    """

    def __init__(self, replica: int, where: Position) -> None:
        self._replica, self._where = replica, where
        self.first: Origin | None = None

    @contextmanager
    def watching_weights(self, cell: int, layers: Iterable[BuiltLayer]) -> Iterator[None]:
        """Looks at the gradients of the layers' weights inside the context."""
        handles, seen = [], set()
        for layer in layers:
            for name, weight in layer.module.named_parameters():
                if weight.requires_grad and id(weight) not in seen:
                    seen.add(id(weight))
                    look = partial(self._look, BACKWARD, -layer.index, cell, layer, f"gradient of {name}")
                    handles.append(weight.register_hook(look))  # type: ignore[no-untyped-call]  # torch's own
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def watched(self, cell: int, call: Call) -> Call:
        """Returns a layer's call with a look at its inputs, outputs, auxiliary loss and what it passes back."""
        layer, forward, auxiliary_loss = call
        ahead = partial(self._look, FORWARD, layer.index, cell, layer)
        back = partial(self._look, BACKWARD, -layer.index, cell, layer)

        def watched_forward(argument: Any) -> Any:
            inputs = as_tensors(argument)
            if layer.index == 0:
                for number, tensor in enumerate(inputs):
                    self._look(FORWARD, DATA, None, None, f"input {number}", tensor)
            outputs = forward(replace_tensors(argument, partial(_alias, look=partial(back, "gradient of the input"))))
            for tensor in as_tensors(outputs):
                ahead("output", tensor)
            return outputs

        def watched_loss(outputs: Any, targets: Tensors) -> Tensor:
            assert auxiliary_loss is not None
            looked_at = partial(_alias, look=partial(back, "gradient of the auxiliary loss"))
            loss = auxiliary_loss(replace_tensors(outputs, looked_at), targets)
            ahead("auxiliary loss", loss)
            return loss

        return layer, watched_forward, None if auxiliary_loss is None else watched_loss

    def watched_task(self, loss: Loss) -> Loss:
        """Wraps the task's loss: looks at the targets, the loss and the gradient that it passes back."""

        def watched_loss(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
            for number, tensor in enumerate(targets):
                self._look(FORWARD, DATA, None, None, f"target {number}", tensor)
            taken = partial(self._look, BACKWARD, -LOSS, None, None, "gradient of the input")
            value, statistics = loss(tuple(_alias(output, taken) for output in outputs), targets)
            self._look(FORWARD, LOSS, None, None, "value", value)
            return value, statistics

        return watched_loss

    def _look(
        self, way: int, place: int, cell: int | None, layer: BuiltLayer | None, what: str, tensor: Tensor
    ) -> None:
        """Notes a tensor that is not finite, if nothing before it was found."""
        micro_batch = self._where.micro_batch
        assert micro_batch is not None  # an instruction runs
        order = way, self._replica, micro_batch, place
        if self.first is not None and self.first.order <= order:
            return
        value = not_finite(tensor)
        if value is not None:
            name, weight = (None, None) if layer is None else (layer.name, _bad_weight(layer))
            self.first = Origin(*order, cell, name, what, value, weight)


def not_finite(tensor: Tensor) -> str | None:
    """Returns "nan" or "inf" for a tensor with such a value, NaN first; None where all values are finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.numel() == 0:
        return None
    extremes = [float(extreme) for extreme in torch.aminmax(values)]  # without a copy of the tensor; NaN wins
    return None if all(map(math.isfinite, extremes)) else "nan" if any(map(math.isnan, extremes)) else "inf"


def _bad_weight(layer: BuiltLayer) -> str | None:
    return next((name for name, weight in layer.module.named_parameters() if not_finite(weight)), None)


def _alias(tensor: Tensor, look: Callable[[Tensor], None]) -> Tensor:
    """Returns a view of the tensor that shows ``look`` the gradient that comes back to it."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    view = tensor.view_as(tensor)
    view.register_hook(look)  # type: ignore[no-untyped-call]  # torch's own
    return view
