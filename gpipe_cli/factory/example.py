"""Finds the shapes of a micro-batch, and gives them to a model whose layers follow from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import Settings
from ..micro_batch import MicroBatch
from ..models.traced.module import example_of
from .build import build_source, parameters_of

EXAMPLE = "example"  # the argument of a model's function that gets the inputs' types and shapes


def example_micro_batch(settings: Settings, micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
    """Returns one micro-batch on the meta device, and the number of examples in the mini-batch.

    Args:
        settings: configuration, whose data are read.
        micro_batches: number of micro-batches in the mini-batch: M times replicas.
        longest: True for examples as long as the data's limits allow.

    Raises:
        ConfigurationError: the mini-batch has too few examples.
    """
    source = build_source(settings.data, 0, settings.task)  # a seed on which no shape depends
    (inputs, targets), examples = source.typical_micro_batch(micro_batches, longest)
    inputs, targets = (tuple(torch.empty_like(tensor, device="meta") for tensor in side) for side in (inputs, targets))
    return (inputs, targets), examples


def asks_for_example(model: Mapping[str, Any]) -> bool:
    """Returns whether the function of the section `model` has an argument ``example`` that is not typed."""
    return EXAMPLE in parameters_of(model) and EXAMPLE not in model


def with_example(settings: Settings, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Returns the section `model`; where it asks for ``example``, with (type, shape) of each input of a micro-batch.

    A function with an argument ``autocast`` gets the run's, as what it traces depends on it.
    """
    if not asks_for_example(settings.model):
        return dict(settings.model)
    given = {EXAMPLE: example_of(inputs), "autocast": settings.precision.autocast}
    known = parameters_of(settings.model)
    return {**settings.model, **{name: value for name, value in given.items() if name in known}}
