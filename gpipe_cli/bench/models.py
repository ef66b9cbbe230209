"""Counts the costs of the paper's models on fake tensors."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from gpipe_cli.launch.context import Context
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.partition.cost import layer_costs

TOKENS, VOCABULARY, IMAGE, CLASSES = 1024, 32000, 224, 1000


def costs_worker(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Counts FLOPs and bytes behind each layer for one example.

    Args:
        config: ``models``: fields of `PaperModel`.
    """
    found = []
    for model in config["models"]:
        if model["family"] == "amoebanet":
            L, D = model["sizes"]
            inputs, builders = torch.randn(1, 3, IMAGE, IMAGE), amoebanet(L, D, CLASSES, IMAGE, auxiliary_head=False)
        else:
            (L,), inputs = model["sizes"], torch.zeros(1, TOKENS, dtype=torch.int64)
            builders = transformer_lm(L, 8192, 32, VOCABULARY)
        layers = layer_costs(builders, (inputs,), "flops")
        sizes = [sum(prod(t.shape) * t.dtype.itemsize for t in layer.outputs or ()) for layer in layers]
        found.append({"costs": [layer.cost for layer in layers], "bytes_behind": sizes})
    return found
