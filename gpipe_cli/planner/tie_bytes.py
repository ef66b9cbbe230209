"""Counts what tied parameters add to a plan: copies of their values, gradients of their uses, two messages a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..partition.fake_layers import TensorShape
from ..pipeline.tied_parameters import Use
from .measure.layer_facts import LayerFacts


def copied_parameters(ties: Sequence[Sequence[Use]]) -> set[str]:
    """Returns the uses for which a worker keeps a value: its first of each parameter that another worker owns."""
    firsts = [{use.worker: use.name for use in reversed(uses)} for uses in ties]
    return {name for (owner, *_), first in zip(ties, firsts, strict=True) for name in first.values()} - {
        owner.name for owner, *_ in ties
    }


def trained_parameters(names: Sequence[str], layers: Sequence[LayerFacts]) -> dict[str, TensorShape]:
    """Returns the trained parameters of the model by full name; ``names``: of the layers."""
    return {
        f"{layer}.{name}": shape
        for layer, facts in zip(names, layers, strict=True)
        for name, shape in facts.parameters
        if name not in facts.frozen
    }


def tie_messages(ties: Sequence[Sequence[Use]], trained: Mapping[str, TensorShape]) -> Iterator[tuple[int, int, int]]:
    """Yields sender, receiver and bytes of every message of a step: gradients to the owners, values back."""
    copied = copied_parameters(ties)
    for owner, *others in ties:
        size = trained[owner.name].bytes if owner.name in trained else 0
        for use in others:
            if use.worker != owner.worker:
                yield use.worker, owner.worker, size
            if use.name in copied:
                yield owner.worker, use.worker, size
