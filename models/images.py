"""What every image model begins with: bytes to numbers of about unit size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalise(nn.Module):
    """uint8 images [b, 3, H, W] to float32 (x / 255 − mean) / std; floating-point images pass untouched.

    Images travel to the device as bytes, a quarter of the size, and a model's first layer calls this. The default
    scales to [−1, 1], as the AmoebaNet recipe for ImageNet does. The memory format (channels last) is kept.

    Args:
        mean, std: one number, or one for each of the three channels, in units of the brightest value.

    Raises:
        ValueError: neither 1 nor 3 numbers, or a standard deviation that is not positive.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float] = 0.5, std: float | Sequence[float] = 0.5) -> None:
        super().__init__()
        self.register_buffer("mean", _per_channel("mean", mean), persistent=False)
        self.register_buffer("std", _per_channel("std", std), persistent=False)
        if not bool((torch.as_tensor(std) > 0).all()):
            raise ValueError(f"model.std={std}: must be positive")

    def forward(self, images: Tensor) -> Tensor:
        if images.is_floating_point():
            return images
        return (images.to(self.mean.dtype) / 255 - self.mean) / self.std


def _per_channel(key: str, value: float | Sequence[float]) -> Tensor:
    """Three numbers as [3, 1, 1]."""
    numbers = torch.tensor(value, dtype=torch.float32).flatten()
    if numbers.numel() not in (1, 3):
        raise ValueError(f"model.{key}={value}: give one number, or one for each of the 3 channels")
    return numbers.expand(3).reshape(3, 1, 1).clone()
