"""Defines gpipe-verify's report: a verdict, findings, notes, and a table for each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from ..config import Settings
from ..difference import Quantity, may_be_rounding
from ..factory.module_itself import ModuleReport
from ..metrics.metrics_file import json_safe
from ..typed_section import shown
from . import compare as c
from .compare import Found, agrees
from .settings import ceiling_of

EXACT = (c.BEGIN, c.RESUMED, c.SKIPPED, c.USED, c.AGAIN, c.CLIPPED, c.RATES, c.REPLICAS)
COUNTED = (c.PASSED_BACK, c.STATISTICS, c.METRICS)  # where rounding decides between two values that are far apart
CEILINGS = {**dict.fromkeys(EXACT, 0.0), **dict.fromkeys(COUNTED, math.inf)}
RELATIVE = attrgetter("relative")


@dataclass(frozen=True)
class VerifyReport:
    """Holds the comparison of some steps.

    Attributes:
        tolerance: the largest relative difference that counted as rounding.
        steps: what was compared, by number of the step.
        findings: what is wrong, as sentences; empty when all agrees.
        notes: what is no error, as sentences.
        loss: of the last step.
        memory: peak bytes of rank 0.
        itself: how the layers of a traced module compare with the module itself; None for other models.
        rounding: what differed in the configured precision, where float64 has decided that it is rounding.
    """

    settings: Settings
    tolerance: float
    steps: Mapping[int, Found]
    findings: list[str]
    notes: list[str]
    loss: float
    memory: int
    rounding: str = ""
    itself: ModuleReport | None = None

    @property
    def agrees(self) -> bool:
        pipelined = bool(self.steps) and all(map(agrees, self.steps.values()))
        return pipelined and (self.itself is None or self.itself.agrees is not False)

    @property
    def may_be_rounding(self) -> bool:
        """Returns whether only quantities differ that rounding can change, and that far, so that float64 can decide."""
        if self.agrees or self.settings.checkpoint.init_from is not None:
            return False
        return may_be_rounding(self._quantities(), CEILINGS, ceiling_of(self.settings))

    def decided_by(self, wide: VerifyReport) -> VerifyReport:
        """Returns the report of the same run in float64, which says what differed here."""
        worst = max((q for q in self._quantities() if q.beyond), key=RELATIVE)
        where = "" if worst.worst is None else f", {worst.worst.where}: {worst.worst.relative:.1e}"
        types = self.settings.precision
        narrow = types.autocast or types.boundaries or "float32"
        return replace(wide, rounding=f"in {narrow} {worst.name} differ by more than rounding{where}")

    @property
    def verdict(self) -> str:
        """Returns the verdict in one line."""
        run = self._run()
        if not self.steps:
            return f"nothing was compared: the data ended before the first step ({run})"
        if not self.agrees and all(map(agrees, self.steps.values())):
            return f"DIFFERENT: the traced layers do not compute what the module itself does ({run})"
        if not self.agrees:
            return f"DIFFERENT: the pipelined run is not the plain one ({run})"
        worst = max((q for q in self._quantities() if q.worst and not q.beyond), key=RELATIVE, default=None)
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
            f"worker{'s' if pipeline.worker_count != 1 else ''}{replicas}, {pipeline.schedule}, "
            + (f"remat {pipeline.remat}" if pipeline.keep is None else f"keep {shown(pipeline.keep)}")
        )

    def _notes(self) -> list[str]:
        found = [] if self.itself is None else [f"the module itself: {self.itself.line}"]
        found += self.notes
        if self.rounding and self.agrees:
            found.append(f"{self.rounding}; in float64 they agree, so it is rounding that grows from layer to layer")
        if self.agrees and any(quantity.beyond for quantity in self._quantities()):
            found.append(
                "some gradients between layers differ, and no gradient of a weight does: where two values tie for a "
                "maximum (max pooling), rounding decides which of them the gradient goes to"
            )
        return found

    def _quantities(self) -> list[Quantity]:
        return [quantity for found in self.steps.values() for quantity in found.values()]

    def as_json(self) -> dict[str, Any]:
        """Returns plain values; numbers that are not finite become null."""
        pipeline = self.settings.pipeline
        plain = {
            "agrees": self.agrees,
            "verdict": self.verdict,
            "findings": self.findings,
            "notes": self._notes(),
            "itself": None if self.itself is None else asdict(self.itself),
            "steps": [
                {"step": number, "quantities": [_quantity(quantity) for quantity in step.values()]}
                for number, step in self.steps.items()
            ],
            "tolerance": self.tolerance,
            "memory_bytes": self.memory,
            "rounding": self.rounding,
            "format": self.settings.verify.format,
            "dtype": self.settings.verify.dtype,
            **{name: getattr(pipeline, name) for name in ("K", "M", "replicas", "schedule", "remat", "keep")},
            "workers": pipeline.worker_count,
            "loss": self.loss,
        }
        return dict(json_safe(plain))


def _quantity(quantity: Quantity) -> dict[str, Any]:
    own = {"name": quantity.name, "verdict": quantity.verdict, "compared": quantity.compared}
    worst = {name: getattr(quantity.worst, name, None) for name in ("absolute", "relative", "where")}
    return {**own, "beyond": len(quantity.beyond), **worst}
