"""Defines gpipe-verify's report: a verdict, findings, notes, and a table for each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import Settings
from ..metrics.metrics_file import json_safe
from .batchnorm import BatchNormNote
from .compare import PASSED_BACK, Quantity, StepComparison


@dataclass(frozen=True)
class VerifyReport:
    """Holds the comparison of some steps.

    Attributes:
        tolerance: the largest relative difference that counted as rounding.
        findings: what is wrong, as sentences; empty when all agrees.
        batchnorm: the effect of M on BatchNorm; None where there is none.
        loss: of the last step.
    """

    settings: Settings
    tolerance: float
    steps: list[StepComparison]
    findings: list[str]
    batchnorm: BatchNormNote | None
    loss: float

    @property
    def agrees(self) -> bool:
        return bool(self.steps) and all(step.agrees for step in self.steps)

    @property
    def verdict(self) -> str:
        """Returns the verdict in one line."""
        run = self._run()
        if not self.steps:
            return f"nothing was compared: the data ended before the first step ({run})"
        if not self.agrees:
            hint = (
                "; verify.dtype=float64 tells rounding from error" if self.settings.verify.dtype == "configured" else ""
            )
            return f"DIFFERENT: the pipelined run is not the plain one ({run}){hint}"
        worst = self._worst()
        if worst is None or worst.worst is None or worst.verdict == "bit for bit":
            return f"OK, bit for bit: the pipelined run is the plain one ({run})"
        most = worst.worst
        return (
            f"OK: the pipelined run is the plain one but for rounding; largest relative difference {most.relative:.1e} "
            f"(absolute {most.absolute:.1e}) in {worst.name}, {most.where}; tolerance {self.tolerance:g} ({run})"
        )

    def _run(self) -> str:
        pipeline, steps = self.settings.pipeline, len(self.steps)
        replicas = f", {pipeline.replicas} replicas" if pipeline.replicas > 1 else ""
        return (
            f"{steps} step{'s' if steps != 1 else ''}, K={pipeline.K}, M={pipeline.M}, {pipeline.worker_count} "
            f"worker{'s' if pipeline.worker_count != 1 else ''}{replicas}, {pipeline.schedule}, remat {pipeline.remat}"
        )

    @property
    def notes(self) -> list[str]:
        """Returns differences that are no errors, as sentences."""
        if not self.agrees or not any(step[PASSED_BACK].beyond for step in self.steps):
            return []
        return [
            "some gradients between layers differ, and no gradient of a weight does: where two values tie for a "
            "maximum (max pooling), rounding decides which of them the gradient goes to"
        ]

    def _worst(self) -> Quantity | None:
        every = [quantity for step in self.steps for quantity in step.quantities]
        found = [quantity for quantity in every if quantity.worst is not None and not quantity.beyond]
        return max(found, key=lambda q: q.worst.relative if q.worst else 0.0, default=None)

    def as_json(self) -> dict[str, Any]:
        """Returns plain values; numbers that are not finite become null."""
        pipeline = self.settings.pipeline
        plain = {
            "agrees": self.agrees,
            "verdict": self.verdict,
            "findings": self.findings,
            "notes": self.notes,
            "batchnorm": None if self.batchnorm is None else {**vars(self.batchnorm), "text": self.batchnorm.text},
            "steps": [
                {"step": number, "quantities": [_quantity(quantity) for quantity in step.quantities]}
                for number, step in enumerate(self.steps, start=1)
            ],
            "tolerance": self.tolerance,
            "format": self.settings.verify.format,
            "dtype": self.settings.verify.dtype,
            "K": pipeline.K,
            "M": pipeline.M,
            "workers": pipeline.worker_count,
            "replicas": pipeline.replicas,
            "schedule": pipeline.schedule,
            "remat": pipeline.remat,
            "loss": self.loss,
        }
        return dict(json_safe(plain))


def _quantity(quantity: Quantity) -> dict[str, Any]:
    worst = quantity.worst
    return {
        "name": quantity.name,
        "verdict": quantity.verdict,
        "compared": quantity.compared,
        "beyond": len(quantity.beyond),
        "absolute": None if worst is None else worst.absolute,
        "relative": None if worst is None else worst.relative,
        "where": None if worst is None else worst.where,
    }
