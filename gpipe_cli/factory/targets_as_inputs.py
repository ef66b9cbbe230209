"""Gives a model the targets among its inputs, for one that computes its own loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..data.source import Batch, Source
from ..micro_batch import MicroBatch


class TargetsAsInputs:
    """Passes on the batches of another source; the inputs of every micro-batch end with its targets."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._source, name)
        if name in ("train", "evaluation", "evaluation_share"):
            return lambda *arguments: map(_with_targets, found(*arguments))
        return _typical(found) if name == "typical_micro_batch" else found


def _with_targets(batch: Batch) -> Batch:
    return replace(batch, micro_batches=[_given(micro_batch) for micro_batch in batch.micro_batches])


def _given(micro_batch: MicroBatch) -> MicroBatch:
    inputs, targets = micro_batch
    return (*inputs, *targets), targets


def _typical(found: Callable[..., tuple[MicroBatch, int]]) -> Callable[..., tuple[MicroBatch, int]]:
    def typical(*arguments: Any) -> tuple[MicroBatch, int]:
        micro_batch, examples = found(*arguments)
        return _given(micro_batch), examples

    return typical
