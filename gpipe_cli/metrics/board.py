"""Writes TensorBoard's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .step_report import PHASES, StepReport

if TYPE_CHECKING:
    from .records import Evaluation


class Board:
    """Writes scalars and samples. Any method may raise an OSError.

    Args:
        folder: of TensorBoard's files.
        resumed_step: what an earlier process wrote for later steps is hidden.
    """

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, and only rank 0 needs it

        self._Summary = Summary
        self._writer: Any = SummaryWriter(str(folder), purge_step=resumed_step + 1)
        self.close = self._writer.close

    def step(self, step: int, row: Mapping[str, float], report: StepReport, shares: Mapping[str, float]) -> None:
        """Writes the numbers of a training step."""
        scalars = {f"breakdown/{name}": value for name, value in shares.items()}
        scalars |= {f"train/{name}": value for name, value in row.items() if name != "step"}
        for cell, seconds in enumerate(report.cells):
            scalars |= {f"cell_{cell:02d}/{kind}_seconds": value for kind, value in seconds.items()}
        for rank, worker in enumerate(report.workers):
            scalars[f"memory/worker_{rank}_bytes"] = worker["memory_bytes"]
            scalars |= {f"worker_{rank:02d}/{phase}_seconds": worker[phase] for phase in PHASES}
        self._scalars(step, scalars)

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Writes the numbers of an evaluation, and its outputs beside their references."""
        self._scalars(step, {f"evaluation/{name}": value for name, value in result.numbers.items()})
        for number, of in enumerate(result.samples):
            text = f"**{of.language}** {of.source}\n\n* reference: {of.reference}\n* output: {of.output}"
            self._writer.add_text(f"samples/{number}", text, step)
        self._writer.flush()

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes all in one event: thousands of them, with hundreds of workers."""
        written = [self._Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(self._Summary(value=written), step)
