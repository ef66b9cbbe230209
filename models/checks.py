"""Checks the keys of a model before any layer is built."""

from __future__ import annotations


def check_sizes(**sizes: int) -> None:
    """Raises ValueError that names a size which is not a whole number from 1 on, or an odd `d_model`."""
    for key, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"model.{key}={size}: use a whole number from 1 on")
    if sizes.get("d_model", 0) % 2:
        width = sizes["d_model"]
        raise ValueError(
            f"model.d_model={width}: sinusoidal positions need an even width: use model.d_model={width + 1}"
        )


def check_fractions(**fractions: float) -> None:
    """Raises ValueError that names a probability which is not at least 0 and less than 1."""
    for key, fraction in fractions.items():
        if not isinstance(fraction, (int, float)) or not 0 <= fraction < 1:
            raise ValueError(f"model.{key}={fraction}: use a probability from 0 up to, but not including, 1")
