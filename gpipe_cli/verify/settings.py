"""Checks the settings of gpipe-verify, and changes them for float64."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..config import Settings
from ..errors import ConfigurationError

TOLERANCES = {"float64": 1e-6, "bfloat16": 1e-3, "float16": 1e-3, "tf32": 1e-3, "float32": 1e-4}


def refuse_what_cannot_be_verified(settings: Settings) -> None:
    """Refuses settings that have no plain counterpart, before anything is built.

    Raises:
        ConfigurationError: the run resumes, or its replicas share the statistics of BatchNorm.
    """
    if settings.checkpoint.resume is not None:
        raise ConfigurationError("gpipe-verify begins at the first step: leave out checkpoint.resume, or use init_from")
    if settings.pipeline.sync_batchnorm and settings.pipeline.replicas > 1:
        message = "gpipe-verify has no plain counterpart of pipeline.sync_batchnorm=true with several replicas"
        raise ConfigurationError(f"{message}: leave it out to verify everything else")


def tolerance_of(settings: Settings) -> float:
    """Returns the largest relative difference that counts as rounding, by the coarsest type in use."""
    precision = settings.precision
    tf32 = "tf32" if precision.tf32 and settings.pipeline.device != "cpu" else None
    if settings.verify.dtype == "float64":
        return TOLERANCES["float64"]
    return TOLERANCES[precision.autocast or precision.boundaries or tf32 or "float32"]


@contextmanager
def in_chosen_type(settings: Settings) -> Iterator[Settings]:
    """Yields settings with which layers and data come in `verify.dtype`, within the context.

    In float64 there is no autocast, boundaries are still cast, to float64, and the loss is still scaled.
    """
    if settings.verify.dtype == "configured":
        yield settings
        return
    wide: Any = "float64"  # users cannot choose this one, so the field's type does not list it
    boundaries = None if settings.precision.boundaries is None else wide
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield dataclasses.replace(
            settings,
            precision=dataclasses.replace(settings.precision, autocast=None, boundaries=boundaries, tf32=False),
        )
    finally:
        torch.set_default_dtype(usual)
