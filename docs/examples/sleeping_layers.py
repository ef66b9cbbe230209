"""Defines a model whose layers sleep as long as an accelerator would compute, to watch K workers without K devices.

    PYTHONPATH=docs/examples gpipe-train model._target_=sleeping_layers.layers data=digits task=classification \
        pipeline.K=4 pipeline.workers=4 pipeline.M=8 "pipeline.partition=[3,2,2,3]" pipeline.remat=always \
        trainer.steps=5 hydra.run.dir=runs/step

The measured step is drawn into runs/step/pictures/step.svg: the picture at the top of the README.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.layers import LayerBuilder

FORWARD_SECONDS = 0.01  # of one micro-batch; a backward takes twice as long


def layers(count: int = 8) -> list[LayerBuilder]:
    """Returns `count` layers that sleep, between a layer that takes images and one that classifies them."""
    first = LayerBuilder("images", Images)
    middle = [LayerBuilder(f"sleep_{number}", Sleep) for number in range(count)]
    return [first, *middle, LayerBuilder("classes", partial(nn.Linear, 64, 10))]


class Images(nn.Module):
    """Maps images, uint8 [b, 3, height, width], to 64 features of each: averages of the pixels and learned offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(64))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(images.float() / 255, 8).mean(1).flatten(1) + self.offset


class Sleep(nn.Module):
    """Adds a learned number and sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.weight)
        return y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(2 * FORWARD_SECONDS)
        return gradients[0], gradients[0].sum()
