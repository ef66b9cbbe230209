"""Plants faults in half precision: the scale of the loss, casts of weights, the type between layers, overflow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

from gpipe_cli.pipeline import cell as cells
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.weight_casts import WeightCasts
from gpipe_cli.trainer import update as weight_update
from gpipe_cli.trainer.update import Updater

from .fault import fault, replaced, run_training

Patch = AbstractContextManager[Any]
FP16 = ("precision=fp16", "model.batchnorm=false")
BF16 = ("precision=bf16", "precision.boundaries=bfloat16", "model.batchnorm=false")
TIMES = r"6.554e\+04 times as large"  # the loss scale


@fault("all parameters|all layers|these gradients", TIMES, *FP16)
def loss_scale_not_divided_out() -> Patch:
    """Leaves the loss scale in the gradients."""
    return replaced(Updater, "reduce_gradients", lambda reduce, updater, scale: reduce(updater))


@fault(r"layer mix_2 \(cell 2\)", TIMES, *FP16)
def loss_scale_left_in_one_layer() -> Patch:
    """Divides the loss scale out of the gradients of all layers but one."""

    def all_but_one(scale: Any, parameters: list[nn.Parameter], factor: float) -> None:
        scale(parameters if factor != 1 / 65536 else [*parameters[:7], *parameters[9:]], factor)

    return replaced(weight_update, "scale_gradients", all_but_one)


@fault("cells 0, 1, 2, 3", "stale weights in forward", *BF16)
def stale_weight_casts() -> Patch:
    """Keeps the casts of weights from one step to the next."""
    return replaced(WeightCasts, "forget", lambda forget, casts: None)


@fault(r"layer head \(cell 3\)", "nothing flows back", *BF16)
def weight_casts_without_a_graph() -> Patch:
    """Casts weights without a graph, so that nothing flows back to them."""

    held = property(lambda casts: [cast.detach() for cast in casts._casts or ()])
    return mock.patch.object(WeightCasts, "held", held)


@fault(r"layer mix_0 \(cell 0\)", "its input or its computation differs", *BF16)
def boundary_cast_left_out() -> Patch:
    """Leaves what passes between the layers of cell 0 as they return it, in float32."""

    def as_it_is(run: Any, cell: Cell, *arguments: Any) -> Any:
        left_out = mock.patch.object(cells, "passed_on", lambda outputs, inputs, dtype: outputs)
        with left_out if cell.number == 0 else nullcontext():
            return run(cell, *arguments)

    return run_training(as_it_is)


@fault(
    r"layer head \(cell 3\)",
    "where parameters collect them",
    "precision=fp16",
    "precision.loss_scale=1073741824",
    "model.batchnorm=false",
)
def overflow_ignored() -> Patch:
    """Takes gradients that overflow float16 for its largest number."""

    def finite(reduce: Any, updater: Updater, scale: float) -> None:
        reduce(updater, scale)
        for parameter in updater._parameters:
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad)

    return replaced(Updater, "reduce_gradients", finite)
