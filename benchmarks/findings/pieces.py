"""Defines the pieces of the experiments: runs of minutes whose words follow from experiments.yaml and the log."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

Record = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """Describes one run: of the search for a rate, where ``rate`` is given, or a full one."""

    experiment: Experiment
    variant: str
    seed: int
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.variant}, " + (f"seed {self.seed}" if self.rate is None else f"rate {self.rate:g}")

    @property
    def steps(self) -> int:
        steps = self.experiment.steps
        steps = steps[self.variant] if isinstance(steps, Mapping) else steps
        return steps if self.rate is None else max(1, round(steps * self.experiment.rate_share))

    @property
    def folder(self) -> Path:
        """Returns the run directory, below the folder of all runs."""
        return Path(self.experiment.name, re.sub(r"\W+", "_", self.name))

    @property
    def source(self) -> Piece | None:
        """Returns the piece whose run this one begins with."""
        named = re.search(r"RUN\((.*)\)", " ".join(self.experiment.variants[self.variant]))
        return Piece(self.experiment, named[1], self.seed) if named else None

    def words(self, log: Log) -> list[str] | None:
        """Returns the words of gpipe-train; None while the search for its rate is not complete."""
        of = self.experiment
        rate = self.rate if self.rate is not None or not of.rates else of.chosen_rate(self.variant, log)
        if of.rates and rate is None:
            return None
        last = {word.split("=")[0]: word for word in (*of.common, *of.words, *of.variants[self.variant])}
        rates = [f"optimizer.lr={rate:g}"] if rate else []
        return [*last.values(), *rates, f"trainer.steps={self.steps}", f"seed={self.seed}"]


@dataclass(frozen=True)
class Experiment:
    """Holds one section of experiments.yaml, which explains the fields."""

    name: str
    common: Sequence[str]
    words: Sequence[str]
    variants: Mapping[str, Sequence[str]]
    steps: int | Mapping[str, int]
    seeds: Sequence[int]
    rates: Sequence[float] = ()
    rate_share: float = 0.25
    rate_figure: str = "nll"
    test: Sequence[str] | None = None
    figures: Sequence[str] = ()
    compare: Sequence[Sequence[str]] = ()

    def search(self, variant: str) -> list[Piece]:
        """Returns the pieces that choose the variant's rate."""
        return [Piece(self, variant, [*self.seeds, 1][0], rate) for rate in self.rates]

    def pieces(self) -> Iterator[Piece]:
        for variant in self.variants:
            yield from self.search(variant)
        for seed in self.seeds:
            yield from (Piece(self, variant, seed) for variant in self.variants)

    def chosen_rate(self, variant: str, log: Log) -> float | None:
        """Returns the rate with the lowest loss of the search; None while a piece of it is missing."""
        found = {piece.rate: log.record(piece) for piece in self.search(variant)}
        losses = {rate: record["metrics"].get(self.rate_figure) for rate, record in found.items() if record}
        losses = {rate: math.inf if loss is None else loss for rate, loss in losses.items()}
        return min(losses, key=losses.__getitem__) if len(losses) == len(self.rates) else None


class Log:
    """Holds the records of finished pieces: a line of JSON each, in the order in which they ended."""

    def __init__(self, lines: Sequence[str] = ()) -> None:
        self._of = {(found["experiment"], found["piece"]): found for found in map(json.loads, lines)}

    @classmethod
    def read(cls, path: Path) -> Log:
        return cls(path.read_text(encoding="utf-8").splitlines() if path.exists() else ())

    def record(self, piece: Piece) -> Record | None:
        """Returns the piece's record, unless it was made with other words than those of today."""
        found: Record | None = self._of.get((piece.experiment.name, piece.name))
        return found if found and found["words"] == piece.words(self) else None


def read_experiments(path: Path) -> dict[str, Experiment]:
    """Reads experiments.yaml."""
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    common = found.pop("common")
    return {name: Experiment(name, common, **fields) for name, fields in found.items()}
