"""Defines modules that cannot be traced, each for a reason of its own."""

import torch
from torch import Tensor, nn


class Base(nn.Module):
    """Has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 10)


class Branching(Base):
    """Chooses by the values of its input."""

    def forward(self, images: Tensor) -> Tensor:
        means = images.mean((2, 3))
        if means.sum() > 0:  # the line that the message names
            means = -means
        return self.head(means)


class Prints(Base):
    """Writes a value into a text."""

    def forward(self, images: Tensor) -> Tensor:
        print(f"{images.max():.3f}")
        return self.head(images.mean((2, 3)))


class LargeImages(Base):
    """Takes images of 224 pixels a side, as torchvision's vit_b_16."""

    def forward(self, images: Tensor) -> Tensor:
        torch._assert(images.shape[2] == 224, f"Wrong image height! Expected 224 but got {images.shape[2]}!")
        return self.head(images.mean((2, 3)))


class TwoInputs(Base):
    """Takes more than the data give."""

    def forward(self, images: Tensor, weights: Tensor) -> Tensor:
        return self.head(images.mean((2, 3))) * weights


class Missing(Base):
    """Reads a file that is not there."""

    def __init__(self) -> None:
        super().__init__()
        torch.load("/nowhere/weights.pt")
