"""Defines gpipe-verify's report: a verdict, findings, notes, and a table for each step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config import Settings
from ..factory.module_itself import ModuleReport
from ..metrics.metrics_file import json_safe
from . import compare as c
from .compare import PASSED_BACK, Quantity, StepComparison
from .settings import ceiling_of

EXACT = {c.BEGIN, c.RESUMED, c.SKIPPED, c.USED, c.SEEDS, c.MODES, c.AGAIN, c.CLIPPED, c.RATES, c.COUNTS, c.REPLICAS}
COUNTED = {c.PASSED_BACK, c.STATISTICS, c.METRICS}  # where rounding decides between two values that are far apart


@dataclass(frozen=True)
class VerifyReport:
    """Holds the comparison of some steps.

    Attributes:
        tolerance: the largest relative difference that counted as rounding.
        steps: comparisons by number of the step.
        findings: what is wrong, as sentences; empty when all agrees.
        batchnorm: the effect of M on BatchNorm (`batchnorm_note`); None where there is none.
        loss: of the last step.
        raised: factor by which the learning rate was raised.
        memory: peak bytes of rank 0: after the first step, and at the end.
        itself: how the layers of a traced module compare with the module itself; None for other models.
        rounding: what differed in the configured precision, where float64 has decided that it is rounding.
    """

    settings: Settings
    tolerance: float
    steps: dict[int, StepComparison]
    findings: list[str]
    batchnorm: dict[str, Any] | None
    loss: float
    raised: float = 1.0
    memory: dict[str, int] = field(default_factory=dict)
    rounding: str = ""
    itself: ModuleReport | None = None

    @property
    def agrees(self) -> bool:
        pipelined = bool(self.steps) and all(step.agrees for step in self.steps.values())
        return pipelined and (self.itself is None or self.itself.agrees is not False)

    @property
    def may_be_rounding(self) -> bool:
        """Returns whether only quantities differ that rounding can change, and that far, so that float64 can decide."""
        settings, ceiling = self.settings, ceiling_of(self.settings)
        if self.agrees or settings.verify.tolerance != "auto" or settings.checkpoint.init_from is not None:
            return False
        found = [quantity for step in self.steps.values() for quantity in step.quantities if quantity.beyond]
        return all(q.name not in EXACT and (q.name in COUNTED or _relative(q) <= ceiling) for q in found)

    def decided_by(self, wide: VerifyReport) -> VerifyReport:
        """Returns the report of the same run in float64, which says what differed here."""
        worst = max((q for step in self.steps.values() for q in step.quantities if q.beyond), key=_relative)
        where = "" if worst.worst is None else f", {worst.worst.where}: {worst.worst.relative:.1e}"
        types = self.settings.precision
        narrow = types.autocast or types.boundaries or "float32"
        text = f"in {narrow} {worst.name} differ by more than rounding{where}"
        return replace(wide, rounding=text)

    @property
    def verdict(self) -> str:
        """Returns the verdict in one line."""
        run = self._run()
        if not self.steps:
            return f"nothing was compared: the data ended before the first step ({run})"
        if not self.agrees and all(step.agrees for step in self.steps.values()):
            return f"DIFFERENT: the traced layers do not compute what the module itself does ({run})"
        if not self.agrees:
            return f"DIFFERENT: the pipelined run is not the plain one ({run})"
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
        wide = " in float64" if self.settings.verify.dtype == "float64" else ""
        replicas = f", {pipeline.replicas} replicas" if pipeline.replicas > 1 else ""
        return (
            f"{steps} step{'s' if steps != 1 else ''}{wide}, K={pipeline.K}, M={pipeline.M}, {pipeline.worker_count} "
            f"worker{'s' if pipeline.worker_count != 1 else ''}{replicas}, {pipeline.schedule}, remat {pipeline.remat}"
        )

    @property
    def notes(self) -> list[str]:
        """Returns what is no error, as sentences."""
        found = []
        if self.itself is not None:
            found.append(f"the module itself: {self.itself.line}")
        if self.raised != 1.0:
            found.append(
                f"the learning rate was raised {self.raised:.4g} times, to its peak: in the first steps of a warm-up "
                "updates are too small to show what they do"
            )
        if self.rounding and self.agrees:
            found.append(f"{self.rounding}; in float64 they agree, so it is rounding that grows from layer to layer")
        if self.agrees and any(step[PASSED_BACK].beyond for step in self.steps.values()):
            found.append(
                "some gradients between layers differ, and no gradient of a weight does: where two values tie for a "
                "maximum (max pooling), rounding decides which of them the gradient goes to"
            )
        return found

    def _worst(self) -> Quantity | None:
        every = [quantity for step in self.steps.values() for quantity in step.quantities]
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
            "batchnorm": self.batchnorm,
            "itself": None if self.itself is None else asdict(self.itself),
            "steps": [
                {"step": number, "quantities": [_quantity(quantity) for quantity in step.quantities]}
                for number, step in self.steps.items()
            ],
            "tolerance": self.tolerance,
            "raised": self.raised,
            "memory_bytes": self.memory,
            "rounding": self.rounding,
            "format": self.settings.verify.format,
            "dtype": self.settings.verify.dtype,
            **{name: getattr(pipeline, name) for name in ("K", "M", "replicas", "schedule", "remat")},
            "workers": pipeline.worker_count,
            "loss": self.loss,
        }
        return dict(json_safe(plain))


def _relative(quantity: Quantity) -> float:
    return quantity.worst.relative if quantity.worst else 0.0


def _quantity(quantity: Quantity) -> dict[str, Any]:
    own = {"name": quantity.name, "verdict": quantity.verdict, "compared": quantity.compared}
    worst = {name: getattr(quantity.worst, name, None) for name in ("absolute", "relative", "where")}
    return {**own, "beyond": len(quantity.beyond), **worst}
