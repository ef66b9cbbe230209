"""What gpipe-verify cannot do is said before it begins."""

from __future__ import annotations

from ..config import Settings
from ..cpu import free_memory
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
    needed, there = parameters * size * COPIES, free_memory()
    if there is not None and needed > there:
        raise ConfigurationError(
            f"gpipe-verify holds the whole model in one process, about {COPIES} times: {parameters:,} parameters need "
            f"{needed / 1e9:.0f} GB and {there / 1e9:.0f} GB are free. Verify a small one of its kind: add debug=tiny"
        )
