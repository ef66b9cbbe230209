"""Defines the records that the training loop makes and the journal writes down."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Holds the progress of the run; the same on every worker.

    Attributes:
        step: number of updates, including skipped ones.
        skipped, skipped_in_a_row: updates left out because a loss or gradient was not finite.
        best, best_step: the lowest evaluation loss so far, and its step if that step's checkpoint is kept, else None.
        evaluations_since_best: evaluations without a new best, for early stopping.
        evaluation_due: True if the evaluation after this step is not complete; a resumed run begins with it.
        loss: loss of the last finite step.
        stopped_by: reason for which the loop ended.
        loss_scale: factor of the loss in backward; None without `precision.loss_scale`: the factor is 1.
        steps_since_overflow: number of finite steps since the factor last changed.
    """

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best: float = math.inf
    best_step: int | None = None
    evaluations_since_best: int = 0
    evaluation_due: bool = False
    loss: float = math.nan
    stopped_by: str = ""
    loss_scale: float | None = None
    steps_since_overflow: int = 0


@dataclass(frozen=True)
class Sample:
    """Holds a sentence, its reference and the model's output."""

    language: str
    source: str
    reference: str
    output: str


@dataclass(frozen=True)
class Evaluation:
    """Holds the results of one evaluation.

    Attributes:
        numbers: the task's metrics and the scores of generated outputs, by name.
        loss: the task's first metric; the lowest selects the best checkpoint. None without data.
        samples: some generated outputs.
        sizes: training pairs of each language, on rank 0, if texts of several languages were scored.
        signature: sacreBLEU's signature: how texts were scored.
        effort: amount of generation (`GenerationSettings.effort`); empty without generation.
        translations: all of them, language after language, on rank 0.
        copying: BLEU of each language's untranslated sources, on rank 0, after the last step.
        classes: result of `class_report`, on rank 0, of a task that predicts classes; else empty.
    """

    numbers: dict[str, float]
    loss: float | None
    samples: list[Sample] = field(default_factory=list)
    sizes: Mapping[str, int] = field(default_factory=dict)
    signature: str | None = None
    effort: Mapping[str, int | None] = field(default_factory=dict)
    translations: Sequence[Sample] = ()
    classes: Mapping[str, Any] = field(default_factory=dict)
    copying: Mapping[str, float] = field(default_factory=dict)
