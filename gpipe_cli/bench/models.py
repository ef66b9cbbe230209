"""The models of the paper's tables 2 and 3, and what a measurement needs to know of them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from gpipe_cli.launch.context import Context
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.partition.cost import layer_costs

from .profiles import Model

TOKENS, VOCABULARY, IMAGE, CLASSES = 1024, 32000, 224, 1000
SMALL_TOKENS, SMALL_VOCABULARY, SMALL_IMAGE, SMALL_CLASSES = 32, 100, 64, 10


def build_layers(model: Model) -> list[LayerBuilder]:
    """The list of layers at the paper's widths, or with `small` at widths that a test can run."""
    small = model.small
    if model.family == "amoebanet":
        (L, D), classes, image = model.sizes, SMALL_CLASSES if small else CLASSES, SMALL_IMAGE if small else IMAGE
        return amoebanet(L, D, classes, image, auxiliary_head=False)
    (L,) = model.sizes
    if small:
        return transformer_lm(L, H=64, A=1, vocabulary=SMALL_VOCABULARY, d_model=32)
    return transformer_lm(L, H=8192, A=32, vocabulary=VOCABULARY)


def random_examples(model: Model, examples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets: random pixels and classes, or random tokens and the tokens behind them."""
    small = model.small
    if model.family == "amoebanet":
        side = SMALL_IMAGE if small else IMAGE
        images = torch.randn(examples, 3, side, side)
        return images, torch.randint(SMALL_CLASSES if small else CLASSES, (examples,))
    length, vocabulary = (SMALL_TOKENS, SMALL_VOCABULARY) if small else (TOKENS, VOCABULARY)
    tokens = torch.randint(vocabulary, (examples, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def profile_worker(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Entry point: cost, FLOPs and bytes behind each layer, for one example, counted on fake tensors.

    Args:
        config: ``models``: fields of `Model`.
    """
    found = []
    for fields in config["models"]:
        model = Model(**fields)
        inputs, _ = random_examples(model, 1)
        layers = layer_costs(build_layers(model), (inputs,), "flops")
        sizes = [sum(prod(t.shape) * t.dtype.itemsize for t in layer.outputs or ()) for layer in layers]
        costs = [layer.cost for layer in layers]
        found.append({"costs": costs, "bytes_behind": sizes, "parameters": sum(layer.parameters for layer in layers)})
    return found
