"""Evaluates through the pipeline, forward only, with the cells, messages and instruction lists of training."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..data.source import Source
from ..decoding.translation import Generator
from ..distributed.pipeline import WorkerPipeline
from ..metrics.class_report import class_report
from ..metrics.records import Evaluation, Sample
from ..micro_batch import Tensors
from .batches import BatchReader, evaluation_batches

Predicted = dict[tuple[int, int], Tensor]
"""Rows [label, class, probability] of the examples of a mini-batch's micro-batch, by the numbers of both."""


@dataclass(frozen=True)
class Evaluator:
    """Runs evaluations; every worker calls `evaluate` at the same step.

    Attributes:
        source: on the first worker of each replica, None elsewhere.
        stop_requested: whether this worker was asked to stop.
        generator: generates outputs, for tasks that do; None otherwise.
    """

    pipeline: WorkerPipeline
    source: Source | None
    stop_requested: Callable[[], bool]
    generator: Generator | None

    def effort(self, final: bool) -> dict[str, int | None]:
        """Returns how much is generated after the last step (``final``) or before; empty where nothing is."""
        return {} if self.pipeline.task.generation is None else self.pipeline.task.generation.effort(final)

    def evaluate(self, final: bool) -> Evaluation:
        """Evaluates each example of the evaluation set once, whatever the replicas.

        Args:
            final: generate as much as after the last step.

        Raises:
            StopRequested: a worker was asked to stop; raised on all workers at the same place.
        """
        self.pipeline.forwards = 0  # each evaluation draws the same random numbers, that of a checkpoint too
        with self.pipeline.evaluating():
            return self._evaluate(final)

    def _evaluate(self, final: bool) -> Evaluation:
        numbers, predicted = self._score()
        loss = next(iter(numbers.values()), None)
        samples, translations, copying, signature = list[Sample](), list[Sample](), dict[str, float](), None
        if self.generator is not None:
            scores, translations, copying = self.generator.evaluate(final)
            samples = self.generator.shown(translations)
            numbers |= scores
            signature = self.pipeline.task.signature() if scores else None
        classes = self._classes(predicted) if self.pipeline.task.predicts else {}
        sizes = dict(self.source.sizes) if self.source is not None and signature is not None else {}
        return Evaluation(numbers, loss, samples, sizes, signature, self.effort(final), translations, classes, copying)

    def _score(self) -> tuple[dict[str, float], Predicted]:
        """Returns the task's numbers over the evaluation set, nothing if it is empty, and this worker's predictions."""
        pipeline, world, message, task = self.pipeline, self.pipeline.world, self.pipeline.message, self.pipeline.task
        reader = None
        if self.source is not None:
            reader = BatchReader(evaluation_batches(self.source, pipeline.M, world.replica, world.replicas), pipeline)
        predicted: Predicted = {}
        sums = torch.zeros(len(task.metrics), dtype=torch.float64, device=world.device)
        weight, batches = 0.0, world.replica  # number of the mini-batch among those of all replicas

        def add(micro_batch: int, outputs: Tensors, targets: Tensors) -> None:
            sums.add_(task.evaluate(outputs, targets).to(sums.device))  # nothing waits for a GPU
            if task.predicts:
                predicted[batches, micro_batch] = task.predictions(outputs, targets)

        while True:
            if reader is not None:
                reader.advance()
            message.run_unless_stopped(self.stop_requested)
            plan = message.read_plan("evaluate")
            if plan.total_micro_batches == 0:
                break
            weight += plan.total_weight
            if plan.signatures:
                pipeline.run_forward(plan.signatures, None if reader is None else reader.micro_batches, add)
            batches += world.replicas
        found = [sums, *(rows.flatten() for rows in predicted.values())]
        together = torch.cat([part.to(sums.device) for part in found]).cpu()
        own, *copied = torch.split(together, [len(part) for part in found])
        message.write_metrics(own)  # what was waited for, in one copy
        message.run()
        totals = dict(zip(task.metrics, message.read_metrics(), strict=True))
        rows = dict(zip(predicted, (of.view(-1, 3) for of in copied), strict=True))
        return task.summarize(totals, weight) if weight else {}, rows

    def _classes(self, predicted: Predicted) -> dict[str, Any]:
        """Returns the report on the classes of all examples, on rank 0; every worker calls it at the same time."""
        own = [[*place, found.tolist()] for place, found in predicted.items()]
        parts = sorted(chain.from_iterable(self.pipeline.world.gather(own)))  # by mini-batch, then micro-batch
        rows = list(chain.from_iterable(found for _, _, found in parts))
        return class_report(rows, self.source) if rows else {}
