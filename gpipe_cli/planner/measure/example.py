"""The shapes of a micro-batch, without reading data where the source can tell them from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ...data.source import Source
from ...errors import ConfigurationError
from ...factory.build import build_source
from ...micro_batch import MicroBatch


def example_micro_batch(data: Mapping[str, Any], micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
    """One micro-batch on the meta device, and the examples of the mini-batch.

    Args:
        data: the configuration's section.
        micro_batches: M times replicas.
        longest: as long as the data's limits allow.

    Raises:
        ConfigurationError: a mini-batch too small for so many micro_batches.
    """
    source = build_source(data)
    typical = getattr(source, "typical_micro_batch", None)
    part, examples = (
        _read(source, micro_batches)
        if typical is None
        else cast("tuple[MicroBatch, int]", typical(micro_batches, longest))
    )
    return (_meta(part[0]), _meta(part[1])), examples


def _read(source: Source, micro_batches: int) -> tuple[MicroBatch, int]:
    """From the data itself: a source of the user's own that has no `typical_micro_batch`."""
    prepare = getattr(source, "prepare", None)
    if prepare is not None:
        prepare(lambda text, done, total: None)
    batches = source.train(None, micro_batches, 0, 1)
    try:
        read = next(iter(batches)).micro_batches
    except StopIteration:
        raise ConfigurationError("data._target_ yields no mini-batch: its train() must not end") from None
    finally:
        if hasattr(batches, "close"):
            batches.close()
    return read[0], sum(len(inputs[0]) for inputs, _ in read)


def _meta(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor, device="meta") for tensor in tensors)
