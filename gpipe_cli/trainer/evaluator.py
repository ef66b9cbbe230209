"""Evaluates through the pipeline, forward only, with the cells, messages and instruction lists of training."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..data.source import HeldOutSample, Source
from ..decoding.decoding import Decoder
from ..distributed.pipeline import WorkerPipeline
from ..metrics.class_report import class_report
from ..metrics.records import Evaluation, Sample
from ..metrics.translation_scores import languages_of, with_averages
from ..micro_batch import Tensors
from .batches import evaluation_batches

Predicted = dict[tuple[int, int], Tensor]
"""Rows [label, class, probability] of the examples of a mini-batch's micro-batch, by the numbers of both."""


@dataclass(frozen=True)
class Evaluator:
    """Runs evaluations; every worker calls `evaluate` at the same step.

    Attributes:
        source: the data source, on the first worker of each replica; None elsewhere.
        stop_requested: returns whether this worker was asked to stop.
        decoder: generates outputs, for tasks that do; None otherwise.
        samples: number of translations that are shown.
    """

    pipeline: WorkerPipeline
    source: Source | None
    stop_requested: Callable[[], bool]
    decoder: Decoder | None
    samples: int

    def effort(self, final: bool) -> dict[str, int | None]:
        """Returns how much text an evaluation generates; empty if the task generates none.

        Args:
            final: True for the evaluation after the last step.
        """
        return {} if self.pipeline.task.generation is None else self.pipeline.task.generation.effort(final)

    def evaluate(self, final: bool) -> Evaluation:
        """Evaluates each example of the evaluation set once, whatever the replicas.

        Args:
            final: True to generate as much as after the last step.

        Raises:
            StopRequested: a worker was asked to stop; raised on all workers at the same place.
        """
        self.pipeline.forwards = 0  # each evaluation draws the same random numbers, that of a checkpoint too
        with self.pipeline.evaluating():
            return self._evaluate(final)

    def _evaluate(self, final: bool) -> Evaluation:
        """Evaluates as `evaluate`; the layers are in evaluation mode."""
        numbers, predicted = self._score()
        found = Evaluation(numbers, next(iter(numbers.values()), None), effort=self.effort(final))
        if self.decoder is not None:
            found = self._translate(self.decoder, found, final)
        return replace(found, classes=self._classes(predicted)) if self.pipeline.task.predicts else found

    def _translate(self, decoder: Decoder, found: Evaluation, final: bool) -> Evaluation:
        """Translates held-out sentences and returns the evaluation with translations and scores; only on rank 0.

        There are scores of all sentences and of each language, and averages over languages. Some sources are so like
        their translations that copying them is the first thing to beat, so the last evaluation also scores the copies.

        Args:
            found: the evaluation so far, which other ranks return as it is.
        """
        source, task, world = self.source, self.pipeline.task, self.pipeline.world
        settings = task.generation
        assert settings is not None
        wanted = settings.per_language_at_end if final else settings.per_language
        sentences: list[HeldOutSample] = []
        if source is not None:
            wanted = source.evaluation_per_language if wanted is None else wanted
            sentences = source.held_out(source.evaluation_split, wanted)
        beam = settings.beam if final else settings.beam_during_run
        hypotheses = decoder.decode([sentence.source_ids for sentence in sentences], beam)
        if source is None or world.rank != 0 or not sentences:  # a corpus may have no dev set
            return found
        texts = [source.decode(hypothesis.tokens) for hypothesis in hypotheses]
        pairs = zip(sentences, texts, strict=True)
        translations = [Sample(of.language, of.source, of.reference, text) for of, text in pairs]
        references, languages = [of.reference for of in sentences], [of.language for of in sentences]
        scores = task.score(texts, references, languages)
        fewest = settings.fewest_sentences if wanted is None else min(settings.fewest_sentences, wanted)
        few = {language for language, count in Counter(languages).items() if count < fewest}
        cut = sum(hypothesis.cut for hypothesis in hypotheses)
        counts = {"cut_translations": float(cut), "languages_with_few_sentences": float(len(few))}
        extra = {name: count for name, count in counts.items() if count}
        copying = task.score([of.source for of in sentences], references, languages) if final else {}
        extra |= {"bleu_copying": copying["bleu"]} if final else {}
        shown = min(len(translations), self.samples)
        return replace(
            found,
            numbers={**found.numbers, **with_averages(scores, source.sizes, few), **extra},
            samples=[translations[number * len(translations) // shown] for number in range(shown)],  # of all languages
            sizes=dict(source.sizes),
            signature=task.signature(),
            translations=translations,
            copying=languages_of(copying),
        )

    def _score(self) -> tuple[dict[str, float], Predicted]:
        """Runs the evaluation set through the pipeline.

        Returns:
            The task's figures over all replicas, none if the set is empty, and this worker's predictions.
        """
        pipeline, world, message, task = self.pipeline, self.pipeline.world, self.pipeline.message, self.pipeline.task
        batches, micro_batches = None, None
        if self.source is not None:
            batches = evaluation_batches(self.source, pipeline.M, world.replica, world.replicas)
        predicted: Predicted = {}
        sums = torch.zeros(len(task.metrics), dtype=torch.float64, device=world.device)
        weight, number = 0.0, world.replica  # number of the mini-batch among those of all replicas

        def add(micro_batch: int, outputs: Tensors, targets: Tensors) -> None:
            sums.add_(task.evaluate(outputs, targets).to(sums.device))  # nothing waits for a GPU
            if task.predicts:
                predicted[number, micro_batch] = task.predictions(outputs, targets)

        while True:
            if batches is not None:
                batch = next(batches, None)
                micro_batches = [] if batch is None else list(batch.micro_batches)
                pipeline.write_plan(micro_batches)
            message.run_unless_stopped(self.stop_requested)
            plan = message.read_plan("evaluate")
            if plan.total_micro_batches == 0:
                break
            weight += plan.total_weight
            if plan.signatures:
                pipeline.run_forward(replace(plan, micro_batches=micro_batches), add)
            number += world.replicas
        found = [sums, *(rows.flatten() for rows in predicted.values())]
        together = torch.cat([part.to(sums.device) for part in found]).cpu()
        own, *copied = torch.split(together, [len(part) for part in found])
        message.mine("metrics")[:] = own  # sums and predictions came in one copy, for which a GPU is waited once
        message.run()
        totals = dict(zip(task.metrics, message.everyones("metrics").sum(0).tolist(), strict=True))
        rows = dict(zip(predicted, (of.view(-1, 3) for of in copied), strict=True))
        return task.summarize(totals, weight) if weight else {}, rows

    def _classes(self, predicted: Predicted) -> dict[str, Any]:
        """Returns the report on the classes of all examples on rank 0, and {} elsewhere; every worker calls it."""
        own = [[*place, found.tolist()] for place, found in predicted.items()]
        parts = sorted(chain.from_iterable(self.pipeline.world.gather(own)))  # by mini-batch, then micro-batch
        rows = list(chain.from_iterable(found for _, _, found in parts))
        return class_report(rows, self.source) if rows else {}
