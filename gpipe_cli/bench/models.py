"""Builds layers that compute: the models of the paper's tables 2 and 3, their costs, and a workload made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_cli.distributed.world import World
from gpipe_cli.launch.context import Context
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.pipeline.cell import build_layer
from gpipe_cli.pipeline.messages.transport import Transport, connect_workers

from .steps import Workload
from .throughput import PaperModel

SEED = 1  # of the weights
EXAMPLES_SEED = 2  # the first worker has the inputs and a peer's last worker the targets of the same mini-batch
TOKENS, VOCABULARY, IMAGE, CLASSES = 1024, 32000, 224, 1000
SMALL = 32, 100, 64, 10  # the same four, at widths that a test can run


def sizes_of(model: PaperModel) -> tuple[int, int, int, int]:
    """Returns the tokens of a text, their vocabulary, the side of an image, and the number of classes."""
    return SMALL if model.small else (TOKENS, VOCABULARY, IMAGE, CLASSES)


def build_layers(model: PaperModel) -> list[LayerBuilder]:
    """Returns the layers at the paper's widths, or with `small` at widths that a test can run."""
    _, vocabulary, image, classes = sizes_of(model)
    if model.family == "amoebanet":
        L, D = model.sizes
        return amoebanet(L, D, classes, image, auxiliary_head=False)
    widths: dict[str, Any] = {"H": 64, "A": 1, "d_model": 32} if model.small else {"H": 8192, "A": 32}
    return transformer_lm(model.sizes[0], vocabulary=vocabulary, **widths)


def random_examples(model: PaperModel, examples: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets: random pixels and classes, or random tokens, each predicting the next."""
    length, vocabulary, side, classes = sizes_of(model)
    if model.family == "amoebanet":
        return torch.randn(examples, 3, side, side), torch.randint(classes, (examples,))
    tokens = torch.randint(vocabulary, (examples, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def costs_worker(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Counts FLOPs and bytes behind each layer for one example, on fake tensors.

    Args:
        config: ``models``: fields of `PaperModel`.
    """
    found = []
    for fields in config["models"]:
        model = PaperModel(**fields)
        inputs, _ = random_examples(model, 1)
        layers = layer_costs(build_layers(model), (inputs,), "flops")
        sizes = [sum(prod(t.shape) * t.dtype.itemsize for t in layer.outputs or ()) for layer in layers]
        costs = [layer.cost for layer in layers]
        found.append({"costs": costs, "bytes_behind": sizes})
    return found


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of logits [b, classes] or [b, T, tokens]."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")


def real_workload(setting: dict[str, Any], world: World) -> Workload:
    """Returns one of the paper's models on this machine's devices, from `Setting.config`."""
    model = PaperModel(**setting["model"])
    torch.manual_seed(EXAMPLES_SEED)
    examples = random_examples(model, setting["examples"])
    cuts = {int(cells): sizes for cells, sizes in setting["cuts"].items()}
    return workload_of(build_layers(model), cuts, setting["M"], setting["remat"], examples, world)


def workload_of(
    builders: Sequence[LayerBuilder],
    cuts: Mapping[int, Sequence[int]],
    M: int,
    remat: str,
    examples: tuple[Tensor, Tensor],
    world: World,
) -> Workload:
    """Returns a workload of layers that compute on the workers' devices."""

    def build(i: int, divisible: bool) -> nn.Module:
        return build_layer(builders[i], i, SEED, world.device)

    def transport(placement: tuple[int, ...]) -> Transport | None:
        if world.message_groups is None or world.all_ranks is None:
            return None
        return connect_workers(placement, world.device, world.wire, world.message_groups, world.all_ranks)

    return Workload(
        build,
        cuts,
        M,
        remat,
        world.worker,
        world.workers,
        examples,
        cross_entropy_sum,
        scale=1.0 / len(examples[0]),
        device=world.device,
        real=True,
        shares_gpu=world.wire.type != world.device.type,
        transport=transport,
    )
