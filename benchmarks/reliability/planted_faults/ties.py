"""Plants faults in tied parameters: embed owns a matrix that judge and head use too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.ties import TiedParameters, Use
from gpipe_cli.trainer.update import Updater

from .fault import fault, replaced, several

Patch = AbstractContextManager[Any]
TIED = ("model.tied=declared", "model.batchnorm=false")


def _without_spread(instead: Callable[[TiedParameters], None]) -> Patch:
    """Does something else where the owners' values should go to the other uses after an update."""

    def update(function: Any, updater: Updater, *rest: Any) -> None:
        with replaced(TiedParameters, "spread", lambda spread, ties: instead(ties)):
            function(updater, *rest)

    return replaced(Updater, "update", update)


@fault("layer embed", "lacks.*head.*tied", *TIED)
def tied_gradient_lost() -> Patch:
    """Leaves out the gradient of one use of a tied parameter."""

    def lose(function: Any, ties: TiedParameters, owner: Use, use: Use) -> Tensor | None:
        return None if use.name.startswith("head") else function(ties, owner, use)

    return replaced(TiedParameters, "_brought_to", lose)


@fault("judge.*cells 1, 3", "has not got.*embed.*tied", *TIED, workers=4)
def tied_value_not_sent() -> Patch:
    """Gives the uses on other workers the owner's value before the first step only."""
    return _without_spread(lambda ties: None)


@fault("layer (judge|head)", "tied to embed.*trained by itself", *TIED)
def tied_parameters_trained_apart() -> Patch:
    """Trains every use of a tied parameter by itself, with an optimizer state of its own."""

    def part(ties: TiedParameters) -> None:
        for parameter in ties.users:
            parameter.data = parameter.data.clone()

    def every(function: Any, cell: Cell) -> list[tuple[str, nn.Parameter]]:
        return [(f"{la.name}.{name}", p) for la in cell.layers for name, p in la.module.named_parameters()]

    nothing = replaced(TiedParameters, "add_gradients", lambda function, ties: None)
    return several(nothing, _without_spread(part), replaced(Cell, "parameters", every))
