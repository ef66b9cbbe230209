"""Evaluation through the pipeline: forward only, the same cells, messages and schedule machinery as training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ..data.source import Source
from ..decoding.decoding import DecoderRuntime
from ..decoding.generation import Generator
from ..distributed.exchange import Exchange, run_unless_stopped
from ..metrics.predictions import PredictionKeeper
from ..metrics.records import Evaluation, Sample
from ..pipeline.cell import Cell
from ..tasks.base import Task
from .batches import evaluation_batches
from .feed import Feed


class Evaluator:
    """Runs evaluations; every worker calls `evaluate` at the same step.

    Args:
        machinery: as many micro-batches in flight as the mini-batches of an evaluation have.
        exchange: with a field ``stop``.
        generator: for tasks that generate; None otherwise.
        keeper: for tasks whose predictions are shown; None otherwise.
    """

    def __init__(
        self,
        machinery: DecoderRuntime,
        source: Source | None,
        task: Task,
        cells: Sequence[Cell],
        exchange: Exchange,
        generator: Generator | None,
        keeper: PredictionKeeper | None = None,
    ) -> None:
        self._machinery, self._source, self._task, self._cells = machinery, source, task, cells
        self._exchange, self._generator, self._keeper = exchange, generator, keeper

    def effort(self, final: bool) -> dict[str, int]:
        """How much is generated after the last step (``final``) or before it; empty where nothing is."""
        generation = getattr(self._task, "generation", None)
        return {} if generation is None else cast("dict[str, int]", generation.effort(final))

    def evaluate(self, final: bool) -> Evaluation:
        """Over the whole evaluation set, each example once, whatever the replicas; ``final``: with more generation.

        Raises:
            StopRequested: somebody asked the run to stop; on all workers, which are then at the same place.
        """
        for cell in self._cells:
            cell.train(False)
        try:
            return self._evaluate(final)
        finally:
            for cell in self._cells:
                cell.train(True)

    def _evaluate(self, final: bool) -> Evaluation:
        numbers = self._score()
        loss = next(iter(numbers.values()), None)
        samples: list[Sample] = []
        signature = None
        if self._generator is not None:
            scores, samples = self._generator.evaluate(final)
            numbers |= scores
            signature = getattr(self._task, "signature", None) if scores else None
        predictions = self._keeper.finish() if self._keeper is not None else None
        sizes = dict(getattr(self._source, "sizes", {})) if signature is not None else {}
        return Evaluation(numbers, loss, samples, predictions, sizes, signature, self.effort(final))

    def _score(self) -> dict[str, float]:
        m, exchange, metrics = self._machinery, self._exchange, self._task.metrics
        world = m.world
        feed = None
        if self._source is not None:
            batches = evaluation_batches(self._source, m.groups, world.replica, world.replicas)
            feed = Feed(batches, self._task.weight)
        sums = torch.zeros(len(metrics), dtype=torch.float64)
        weight = 0.0

        def add(micro_batch: int, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
            sums.add_(self._task.evaluate(outputs, targets).cpu())
            if self._keeper is not None:
                self._keeper.judged(outputs, targets)

        while True:
            if feed is not None:
                feed.advance()
                m.codec.write(exchange, feed.micro_batches, feed.weights)
                if self._keeper is not None:
                    self._keeper.read(feed.micro_batches)
            run_unless_stopped(exchange, m.stop_requested)
            plan = m.codec.read(exchange, "evaluate")
            if plan.total_micro_batches == 0:
                break
            weight += plan.total_weight
            if plan.signatures:
                instructions = m.schedules.forward_lists(len(plan.signatures))[world.worker]
                m.engine.run_forward(
                    instructions, plan.signatures, feed.micro_batches if feed is not None else None, add
                )
        exchange.own["metrics"].view(world.replicas, -1)[world.replica] += sums
        exchange.run()
        totals = exchange.total["metrics"].view(world.replicas, -1).sum(0).tolist()
        if not weight:
            return {}
        return self._task.summarize(dict(zip(metrics, totals, strict=True)), weight)
