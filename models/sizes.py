"""Limits of the Transformers' keys, checked before any layer is built, and the depth-scaled initialisation's factor."""

from __future__ import annotations

import math


def check_sizes(**sizes: int) -> None:
    """Each size is a whole number from 1 on, and `d_model` is even.

    Raises:
        ValueError: naming the key.
    """
    for key, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"model.{key}={size}: use a whole number from 1 on")
    if sizes.get("d_model", 0) % 2:
        width = sizes["d_model"]
        raise ValueError(
            f"model.d_model={width}: sinusoidal positions need an even width: use model.d_model={width + 1}"
        )


def check_fractions(**fractions: float) -> None:
    """Each dropout probability is at least 0 and less than 1.

    Raises:
        ValueError: naming the key.
    """
    for key, fraction in fractions.items():
        if not isinstance(fraction, (int, float)) or not 0 <= fraction < 1:
            raise ValueError(f"model.{key}={fraction}: use a probability from 0 up to, but not including, 1")


def refuse_tied(tie_embeddings: bool) -> None:
    """Raises ValueError when tables shall be shared: the layers that share one may lie in different cells."""
    if tie_embeddings:
        raise ValueError(
            "model.tie_embeddings=true: embeddings and softmax would share a table across layers that may lie in "
            "different cells, which is not supported: use model.tie_embeddings=false"
        )


def depth_scale(layers: int, exponent: float) -> float:
    """n^-exponent: what the Xavier bound of feed-forward matrices is multiplied by in a model of n layers.

    The paper (section 5) says only that the initialisation is scaled down by the number of layers, after Fixup, whose
    rule for two matrices per residual branch is the exponent ½; the exponent 1 is the other reading.
    """
    return math.pow(layers, -exponent)
