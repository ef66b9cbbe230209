"""Defines a task: the interface between the trainer and `task._target_`, which holds the loss and the metrics."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_type_hints

from ..errors import Problems
from ..micro_batch import Tensors
from ..typed_section import Count, CountOrZero, NotNegative, read_values

if TYPE_CHECKING:
    from torch import Tensor


Tokenizer = Literal["none", "13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "flores101", "flores200"]


class Task(ABC):
    """Computes loss and metrics of micro-batches, as sums, which do not depend on how a mini-batch is divided.

    `task._target_` names a subclass. `outputs` are those of the last layer, as a tuple even if there is only one
    tensor; `targets` are the data source's. `weight` gets the targets on the CPU, the other methods get all on the
    device.

    Attributes:
        statistics: names of the sums that `loss` also returns, in pairs (part, whole) such as ("accuracy", "examples").
            The quotient of a pair is logged under the name of the part.
        metrics: names of the sums that `evaluate` returns.
        unit: name of the things that `weight` counts: "examples" or "tokens".
        generation: settings of the texts that an evaluation generates; None: it generates none.
        predicts: True if `predictions` gives the class of each example.
    """

    statistics: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("loss",)
    unit: str = "examples"
    generation: GenerationSettings | None = None
    predicts: bool = False

    def weight(self, targets: Tensors) -> float:
        """Returns the number of examples, or of tokens that are not padding."""
        return float(len(targets[0]))

    @abstractmethod
    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """Returns, for training, (the sum of the loss, a scalar; `statistics`, float64 without gradient)."""

    def evaluate(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns the micro-batch's `metrics`: float64, on the device."""
        return self.loss(outputs, targets)[0].double().reshape(1)

    def summarize(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Returns the figures of an evaluation; the first one is the loss by which the best checkpoint is chosen.

        Args:
            sums: `metrics` summed over the evaluation set.
            weight: total weight of the evaluation set; positive.
        """
        return {name: sums[name] / weight for name in self.metrics}

    def predictions(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns for each example [label, predicted class, its probability], float64 [b, 3], on the device."""
        raise NotImplementedError

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Returns float32 [b, V] of the next token (−∞: never), from the last position of logits [b, t, V]."""
        raise NotImplementedError

    def score(
        self, hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Returns the scores of generated sentences by name and, with `groups`, also those of each group.

        Args:
            groups: the name of each sentence's group; None: no groups.
        """
        raise NotImplementedError

    def signature(self) -> str | None:
        """Returns a short text that describes how `score` counts; None without scores."""
        return None


@dataclass(frozen=True)
class GenerationSettings:
    """Holds the attribute ``generation`` of a task. The defaults are for runs older than the key.

    Attributes:
        per_language, per_language_at_end: sentences of each language, during the run and after its last step; None: as
            many as the loss is evaluated on (`data.evaluation_per_language`).
        group: sentences generated together; as many groups as micro-batches are in flight.
        max_length: most tokens of a translation, its end-of-sentence token included.
        beam: hypotheses kept of each sentence, after the last step and in commands that translate; 1: greedy.
        beam_during_run: the same, in evaluations during the run.
        length_exponent: a translation y has the score log p(y) / ((|y| + 5) / 5)^length_exponent.
        length_ratio, length_extra: a translation has at most length_ratio · source tokens + length_extra tokens.
        language: language of the translations; None: unknown.
        bleu_tokenizer: name of sacreBLEU's tokenizer; None: chosen by the language.
        fewest_sentences: least number of sentences with which a language counts in averages, unless all have fewer.
    """

    per_language: Count | None
    per_language_at_end: Count | None
    group: Count
    max_length: Count
    beam: Count = 8
    beam_during_run: Count = 1
    length_exponent: NotNegative = 0.5
    length_ratio: NotNegative = 3.0
    length_extra: CountOrZero = 10
    language: str | None = None
    bleu_tokenizer: Tokenizer | None = None
    fewest_sentences: CountOrZero = 50

    def __post_init__(self) -> None:
        """Refuses wrong values.

        Raises:
            ConfigurationError: some values are wrong; the message has a line for each.
        """
        problems = Problems()
        hints = get_type_hints(GenerationSettings, include_extras=True)
        read_values(hints, vars(self), "task.generation.", problems)
        problems.refuse()

    def effort(self, at_end: bool) -> dict[str, int | None]:
        """Returns the `sentences_per_language` and the `beam` of an evaluation, for reports.

        Args:
            at_end: True for the evaluation after the last step.
        """
        if at_end:
            return {"sentences_per_language": self.per_language_at_end, "beam": self.beam}
        return {"sentences_per_language": self.per_language, "beam": self.beam_during_run}

    def longest(self, source_tokens: int) -> int:
        """Returns the most tokens of a translation of `source_tokens` tokens, the end-of-sentence token included."""
        return max(1, min(self.max_length, math.ceil(self.length_ratio * source_tokens) + self.length_extra))
