"""What gpipe-verify cannot do is said before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import Settings
from ..errors import ConfigurationError

# Tensors of the model's size that rank 0 holds at the most: of both sides weights, gradients and two of optimizer
# state, for each of two steps, the plain model itself, and the comparison's own.
COPIES = 16


def refuse_what_cannot_be_verified(settings: Settings) -> None:
    """Before anything is made.

    Raises:
        ConfigurationError: this configuration has no plain counterpart.
    """
    if settings.checkpoint.resume is not None:
        raise ConfigurationError(
            "gpipe-verify begins at the first step: leave out checkpoint.resume; checkpoint.init_from=RUN compares "
            "with the weights of a run"
        )
    if settings.verify.dtype == "float64" and settings.precision.autocast is not None:
        raise ConfigurationError(
            f"verify.dtype=float64 tells rounding from error, precision.autocast={settings.precision.autocast} rounds: "
            "use precision=fp32, or leave out verify.dtype"
        )


def require_memory(parameters: int, size: int) -> None:
    """On rank 0, once the model's size is known.

    Args:
        parameters: of the whole model.
        size: bytes of a parameter.

    Raises:
        ConfigurationError: the model does not fit into one process beside its comparison.
    """
    needed, there = parameters * size * COPIES, available_memory()
    if there is not None and needed > there:
        raise ConfigurationError(
            f"gpipe-verify holds the whole model in one process, about {COPIES} times: {parameters:,} parameters need "
            f"{needed / 1e9:.0f} GB and {there / 1e9:.0f} GB are free. Verify a small one of its kind: add debug=tiny"
        )


def available_memory() -> int | None:
    """Bytes that are free where rank 0 compares; None where the system does not say."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
