"""Defines the records that the training loop makes and the journal writes down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .predictions import Predictions


@dataclass
class Progress:
    """How far the run has come; the same on every worker.

    Attributes:
        step: updates done, skipped ones counted in.
        skipped, skipped_in_a_row: updates left out because something was not finite.
        best: the lowest evaluation loss so far.
        evaluations_since_best: for early stopping.
        evaluation_due: the evaluation after this step is still to be made, or was broken off: a resumed run begins so.
        loss: of the last finite step.
        stopped_by: why the loop ended.
    """

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best: float = math.inf
    evaluations_since_best: int = 0
    evaluation_due: bool = False
    loss: float = math.nan
    stopped_by: str = ""


@dataclass(frozen=True)
class Sample:
    """A sentence, its reference and what the model made of it."""

    language: str
    source: str
    reference: str
    output: str

    def as_markdown(self) -> str:
        return f"**{self.language}** {self.source}\n\n* reference: {self.reference}\n* output: {self.output}"


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found.

    Attributes:
        numbers: by name, what the task makes of its sums, and scores of generated outputs.
        loss: the first of the task's numbers: lower is better, it selects the best checkpoint. None without data.
        samples: generated outputs to look at.
        predictions: of a classification, on rank 0.
        sizes: training pairs of each language, on rank 0, where texts of several languages were scored.
        signature: how texts were scored, in the words of sacreBLEU.
        effort: how much was generated (`GenerationSettings.effort`); empty where nothing is.
    """

    numbers: dict[str, float]
    loss: float | None
    samples: list[Sample] = field(default_factory=list)
    predictions: Predictions | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    signature: str | None = None
    effort: Mapping[str, int] = field(default_factory=dict)
