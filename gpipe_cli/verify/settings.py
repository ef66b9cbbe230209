"""Checks the settings of gpipe-verify, and changes them for float64: the same weights and examples, wider."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..config import Settings
from ..cpu import free_memory
from ..data.source import Batch, Source
from ..errors import ConfigurationError
from ..layers import LayerBuilder

TOLERANCES = {"float64": 1e-6, "bfloat16": 0.05, "configured": 1e-4}

# Tensors of the model's size that rank 0 holds at the most: weights, gradients and two of optimizer state, of both
# sides and for each of two steps, the plain model itself, and the comparison's own.
COPIES = 16


def refuse_what_cannot_be_verified(settings: Settings) -> None:
    """Refuses settings that have no plain counterpart, before anything is built.

    Raises:
        ConfigurationError: the run resumes, or float64 is asked for beside autocast.
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
    """Refuses a model that is too large for one process; on rank 0, once its size is known.

    Args:
        parameters: of the whole model.
        size: bytes of a parameter.

    Raises:
        ConfigurationError: the model and its comparison do not fit into memory.
    """
    needed, there = parameters * size * COPIES, free_memory()
    if there is not None and needed > there:
        raise ConfigurationError(
            f"gpipe-verify holds the whole model in one process, about {COPIES} times: {parameters:,} parameters need "
            f"{needed / 1e9:.0f} GB and {there / 1e9:.0f} GB are free. Verify a small one of its kind: add debug=tiny"
        )


def tolerance_of(settings: Settings) -> float:
    """Returns the largest relative difference that counts as rounding."""
    wanted = settings.verify.tolerance
    return TOLERANCES[settings.precision.autocast or settings.verify.dtype] if wanted == "auto" else wanted


def in_wanted_dtype(settings: Settings) -> Settings:
    """Returns settings whose layers and data come in float64 where `verify.dtype=float64`."""
    if settings.verify.dtype == "configured":
        return settings
    data = {"_target_": f"{__name__}.Float64Source", "source": settings.data}
    return dataclasses.replace(
        settings,
        model={"_target_": f"{__name__}.float64_layers", "layers": settings.model},
        data={**data, "batch_size": settings.data.get("batch_size")},
    )


def float64_layers(layers: Sequence[LayerBuilder]) -> list[LayerBuilder]:
    """Returns ``layers`` with float64 parameters and buffers; weights are drawn in float32, then converted."""
    return [dataclasses.replace(layer, build=partial(_build, layer.build)) for layer in layers]


def _build(build: Callable[[], nn.Module]) -> nn.Module:
    return build().double()


class Float64Source:
    """Passes on the batches of another source with every floating-point tensor in float64.

    Args:
        source: made from the configuration's own section.
        batch_size: of the section; unused, because the source knows it already.
    """

    def __init__(self, source: Source, batch_size: object = None) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        return map(_widen, self._source.train(position, M, replica, replicas))

    def evaluation(self, M: int) -> Iterator[Batch]:
        return map(_widen, self._source.evaluation(M))


def _widen(batch: Batch) -> Batch:
    wide = [(_wide(inputs), _wide(targets)) for inputs, targets in batch.micro_batches]
    return dataclasses.replace(batch, micro_batches=wide)


def _wide(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)
