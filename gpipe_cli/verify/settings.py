"""Checks the settings of gpipe-verify, and changes them for float64: the same weights and examples, wider."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from ..config import Settings
from ..data.source import Source
from ..errors import ConfigurationError
from ..factory.build import build_model, parameters_of
from ..factory.wrappers import ChangedSource, widened
from ..layers import LayerBuilder, announce

TOLERANCES = {"float64": 1e-6, "bfloat16": 1e-3, "float16": 1e-3, "tf32": 1e-3, "configured": 1e-4}

# The largest relative difference that may turn out to be rounding. In half precision both sides run the same kernels,
# and float64 runs without their code, so little is excused. In float32 rounding may grow until nothing is left of a
# result but its size.
CEILING, CEILING_IN_HALF = 10.0, 0.02


def refuse_what_cannot_be_verified(settings: Settings) -> None:
    """Refuses settings that have no plain counterpart, before anything is built.

    Raises:
        ConfigurationError: the run resumes, or its replicas share the statistics of BatchNorm.
    """
    if settings.checkpoint.resume is not None:
        raise ConfigurationError("gpipe-verify begins at the first step: leave out checkpoint.resume, or use init_from")
    if settings.pipeline.sync_batchnorm and settings.pipeline.replicas > 1:
        said = "gpipe-verify has no plain counterpart of pipeline.sync_batchnorm=true with several replicas"
        raise ConfigurationError(f"{said}: leave it out to verify everything else")


def tolerance_of(settings: Settings) -> float:
    """Returns the largest relative difference that counts as rounding."""
    precision = settings.precision
    tf32 = "tf32" if precision.tf32 and settings.pipeline.device != "cpu" else None
    return TOLERANCES[precision.autocast or precision.boundaries or tf32 or settings.verify.dtype]


def ceiling_of(settings: Settings) -> float:
    """Returns the relative difference above which nothing counts as rounding, whatever float64 says."""
    return CEILING_IN_HALF if settings.precision.autocast or settings.precision.boundaries else CEILING


def in_float64(settings: Settings) -> Settings:
    """Returns settings whose layers and data come in float64, without autocast.

    Boundaries are still cast, to float64, and the loss is still scaled.
    """
    data = {"_target_": f"{__name__}.Float64Source", "source": settings.data}
    assert settings.verification is not None
    wide: Any = "float64"  # beside what a user may choose
    boundaries = None if settings.precision.boundaries is None else wide
    return dataclasses.replace(
        settings,
        model={"_target_": f"{__name__}.float64_layers", "layers": settings.model, "_recursive_": False},
        data={**data, "batch_size": settings.data.get("batch_size")},
        precision=dataclasses.replace(settings.precision, autocast=None, boundaries=boundaries, tf32=False),
        verification=dataclasses.replace(settings.verification, dtype="float64"),
    )


def float64_layers(layers: Mapping[str, Any], seed: int) -> list[LayerBuilder]:
    """Returns a model's layers with float64 parameters and buffers; weights are drawn in float32, then converted.

    Args:
        layers: the configuration's own section.
    """
    if "float_type" in parameters_of(layers):  # of layers whose code holds types: traced modules
        layers = {**layers, "float_type": "float64"}
    return [dataclasses.replace(layer, build=_Widened(_build, layer)) for layer in build_model(layers, seed)]


class _Widened(partial[nn.Module]):
    """Builds a layer in float64."""

    def announce(self) -> None:
        announce(self.args)


def _build(layer: LayerBuilder) -> nn.Module:
    return layer.build().double()


@Source.register  # its methods are those of the source inside
class Float64Source(ChangedSource):
    """Passes on the batches of another source with every floating-point tensor in float64.

    Args:
        source: made from the configuration's own section.
        batch_size: the section's; unused, because the source knows it already.
    """

    def __init__(self, source: Source, batch_size: object = None) -> None:
        super().__init__(source, widened)
