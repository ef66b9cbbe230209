"""Checks an evaluation after the last step: the trainer's own, of one mini-batch, against the plain model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor

from ..data.source import Batch, Source
from ..difference import NO_LAYER
from ..trainer.batches import evaluation_batches
from ..trainer.loop import Trainer
from . import compare as c
from .check import Checker, beside, by_name
from .compare import Found
from .record import OUTPUT, Seen, of_kind


class FirstBatches:
    """Passes on a source whose evaluation set is one mini-batch for each replica."""

    def __init__(self, source: Source) -> None:
        self._source, self.class_names = source, source.class_names

    def evaluation_share(self, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields the first mini-batch."""
        return islice(self._source.evaluation_share(M, replica, replicas), 1)


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Runs the trainer's evaluation, without generation, as it does between two steps; returns its numbers."""
    source: Any = None if trainer.evaluator.source is None else FirstBatches(trainer.evaluator.source)
    evaluator = replace(trainer.evaluator, source=source, generator=None)
    with trainer.updater.averaged_weights():
        return evaluator.evaluate(final=False).numbers


def check_evaluation(checker: Checker, numbers: Mapping[str, float], seen: Seen, step: int, source: Source) -> Found:
    """Compares an evaluation with that of the plain model.

    Args:
        numbers: the pipeline's.
        seen: of its layers.
        step: number of the step before it, from 1.
        source: of the run.
    """
    settings = checker.settings
    M, replicas = settings.pipeline.M, settings.pipeline.replicas
    reads = [evaluation_batches(source, M, replica, replicas) for replica in range(replicas)]
    micro_batches = [[pair for batch in islice(read, 1) for pair in batch.micro_batches] for read in reads]

    def load(layer: int) -> dict[str, Tensor]:
        tensors = checker.spill.get(f"held {step}", layer)  # averages, where there are any, in place of their weights
        return {**of_kind("weight", tensors), **of_kind("buffer", tensors), **of_kind("average", tensors)}

    right, plain = checker.model.evaluate(micro_batches, load, step - 1)
    outputs = beside(seen.get(OUTPUT, {}), plain.get(OUTPUT, {}))
    mine, theirs = ({(NO_LAYER, name): number for name, number in side.items()} for side in (numbers, right))
    return by_name(
        [
            c.traces(c.EVALUATED, outputs, checker.run, checker.tolerance),
            c.numbers(c.METRICS, mine, theirs, checker.tolerance),
            checker.unchanged(c.KEPT, f"held {step}", "evaluated"),
        ]
    )
