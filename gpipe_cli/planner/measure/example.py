"""The shapes of a micro-batch, without reading data where the source can tell them from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ...data.source import Source
from ...distributed.batch_plan import Part
from ...errors import ConfigurationError
from ...factory.build import build_source


def example_part(data: Mapping[str, Any], parts: int, longest: bool) -> tuple[Part, int]:
    """One micro-batch on the meta device, and the examples of the mini-batch.

    Args:
        data: the configuration's section.
        parts: M times replicas.
        longest: as long as the data's limits allow.

    Raises:
        ConfigurationError: a mini-batch too small for so many parts.
    """
    source = build_source(data)
    typical = getattr(source, "typical_part", None)
    part, examples = _read(source, parts) if typical is None else cast("tuple[Part, int]", typical(parts, longest))
    return (_meta(part[0]), _meta(part[1])), examples


def _read(source: Source, parts: int) -> tuple[Part, int]:
    """From the data itself: a source of the user's own that has no `typical_part`."""
    prepare = getattr(source, "prepare", None)
    if prepare is not None:
        prepare(lambda text, done, total: None)
    batches = source.train(None, parts, 0, 1)
    try:
        read = next(iter(batches)).parts
    except StopIteration:
        raise ConfigurationError("data._target_ yields no mini-batch: its train() must not end") from None
    finally:
        if hasattr(batches, "close"):
            batches.close()
    return read[0], sum(len(inputs[0]) for inputs, _ in read)


def _meta(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor, device="meta") for tensor in tensors)
