"""Checks an evaluation after the last step: the trainer's own, of one mini-batch, against the plain model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor

from ..data.source import Batch, Source
from ..micro_batch import MicroBatch
from ..trainer.batches import evaluation_batches
from ..trainer.loop import Trainer
from . import compare as c
from .check import Checker
from .compare import Quantity
from .record import OUTPUT, LayerTrace, RecordedStep, of_kind


class FirstBatches:
    """Passes on a source whose evaluation set is one mini-batch for each replica.

    Args:
        source: of the run.
        replicas: their number.
    """

    def __init__(self, source: Source, replicas: int) -> None:
        self._source, self._replicas = source, replicas

    def evaluation_share(self, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields the first mini-batch."""
        return islice(self._source.evaluation_share(M, replica, replicas), 1)


def evaluate(trainer: Trainer, replicas: int) -> dict[str, float]:
    """Runs the trainer's evaluation, without generation, as it does between two steps; returns its numbers."""
    source: Any = None if trainer.evaluator.source is None else FirstBatches(trainer.evaluator.source, replicas)
    evaluator = replace(trainer.evaluator, source=source, generator=None, keeper=None)
    with trainer.updater.averaged_weights():
        return evaluator.evaluate(final=False).numbers


def check_evaluation(
    checker: Checker, numbers: Mapping[str, float], record: RecordedStep, step: int, source: Source
) -> list[Quantity]:
    """Compares an evaluation with that of the plain model.

    Args:
        numbers: the pipeline's.
        record: with the fingerprints of its layers.
        step: number of the step before it, from 1.
        source: of the run.
    """
    settings = checker.settings
    M, replicas = settings.pipeline.M, settings.pipeline.replicas
    reads = [evaluation_batches(source, M, replica, replicas) for replica in range(replicas)]
    micro_batches = [[pair for batch in islice(read, 1) for pair in batch.micro_batches] for read in reads]
    averaged = settings.trainer.average is not None
    plain, seen = _plain(checker, micro_batches, step, averaged)
    names, mine, right = checker.run.names, record.trace.get(OUTPUT, {}), seen.trace.get(OUTPUT, {})
    quantities = [c.traces(c.EVALUATED, mine, right, names, checker.tolerance)]
    if averaged and quantities[0].beyond:
        other = _plain(checker, micro_batches, step, False)[1].trace[OUTPUT]
        if not c.traces(c.EVALUATED, mine, other, names, checker.tolerance).beyond:
            quantities = [replace(quantities[0], name=c.NOT_AVERAGED)]
    pairs = {name: (numbers.get(name, float("inf")), number) for name, number in plain.items()}
    return [*quantities, c.numbers(c.METRICS, pairs, checker.tolerance)]


def _plain(
    checker: Checker, micro_batches: Sequence[Sequence[MicroBatch]], step: int, averaged: bool
) -> tuple[dict[str, float], LayerTrace]:
    def load(layer: int) -> dict[str, Tensor]:
        tensors = checker.spill.get(f"held {step}", layer)
        of_layer = {**of_kind("weight", tensors), **of_kind("buffer", tensors)}
        return of_layer | (of_kind("average", tensors) if averaged else {})

    return checker.model.evaluate(micro_batches, load, step - 1)
