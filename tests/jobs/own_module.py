"""Small modules as their users write them, traced by model=module."""

from __future__ import annotations

from torchvision.models import MobileNetV2


def mobile_net(dropout: float = 0.0) -> MobileNetV2:
    """Returns torchvision's MobileNetV2, narrow and with four blocks: residual branches, BatchNorm, in-place ReLU6."""
    blocks = [[1, 8, 1, 1], [6, 8, 2, 2], [6, 16, 1, 2]]
    return MobileNetV2(num_classes=10, width_mult=0.25, inverted_residual_setting=blocks, dropout=dropout)
