"""Compares the weights of the replicas: they must be equal when a run begins and after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import nn

from ..distributed.world import World
from ..errors import ConfigurationError
from ..pipeline.cell import Cell


def require_equal_replicas(world: World, cells: Sequence[Cell]) -> None:
    """Refuses a run whose replicas hold different weights or buffers; every worker calls it at the same time.

    Raises:
        ConfigurationError: it names the first layer that differs.
    """
    if world.replicas == 1:
        return
    everyone = world.all_gather([(layer.name, fingerprint(layer.module)) for cell in cells for layer in cell.layers])
    wrong = [
        (name, rank // world.workers)
        for rank, layers in enumerate(everyone)
        for (name, mark), (_, first) in zip(layers, everyone[rank % world.workers], strict=True)
        if mark != first
    ]
    if wrong:
        name, replica = wrong[0]
        raise ConfigurationError(
            f"layer {name!r} has other weights on replica {replica} than on replica 0: something that makes the model "
            "is not the same in every process. Draw weights from the default generators of torch, numpy or Python, "
            "which gpipe-train seeds, and read the same files on every machine"
        )


def fingerprint(module: nn.Module) -> str:
    """Returns a checksum of the names, types and values of all parameters and buffers."""
    checksum = blake2b(digest_size=16)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        checksum.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()
