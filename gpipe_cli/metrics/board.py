"""Writes TensorBoard's files; a run goes on without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ..disk import cannot_write
from .step_report import PHASES, StepReport

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

    from .records import Evaluation


class Board:
    """Writes scalars, samples and pictures. After a first failure it warns and writes nothing more.

    Args:
        folder: of TensorBoard's files.
        resumed_step: what an earlier process wrote for later steps is hidden.
        warn: receives the warning.
    """

    def __init__(self, folder: Path, resumed_step: int, warn: Callable[[str], None]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, and only rank 0 needs it

        self._folder, self._warn = folder, warn
        self._writer: SummaryWriter | None = None
        try:
            self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)
        except OSError as error:
            self._give_up(error)

    def step(self, step: int, row: Mapping[str, float], report: StepReport, shares: Mapping[str, float]) -> None:
        """Writes the numbers of a training step."""
        scalars = {f"breakdown/{name}": value for name, value in shares.items()}
        scalars |= {f"train/{name}": value for name, value in row.items() if name != "step"}
        for cell, seconds in enumerate(report.cells):
            scalars |= {f"cell_{cell:02d}/{kind}_seconds": value for kind, value in seconds.items()}
        for rank, worker in enumerate(report.workers):
            scalars[f"memory/worker_{rank}_bytes"] = worker["memory_bytes"]
            scalars |= {f"worker_{rank:02d}/{phase}_seconds": worker[phase] for phase in PHASES}
        self.scalars(step, scalars)

    def evaluation(self, step: int, result: Evaluation, pictures: Sequence[Path]) -> None:
        """Writes the numbers of an evaluation, its outputs beside their references, and pictures."""
        self.scalars(step, {f"evaluation/{name}": value for name, value in result.numbers.items()})
        for number, sample in enumerate(result.samples):
            self._write("add_text", f"samples/{number}", sample.as_markdown(), step)
        for path in pictures:
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            self._write("add_image", f"evaluation/{path.stem}", pixels, step, dataformats="HWC")
        self._write("flush")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers by name."""
        for name, value in values.items():
            self._write("add_scalar", name, value, step)

    def close(self) -> None:
        """Writes the rest and closes the files."""
        self._write("close")

    def _write(self, method: str, *arguments: Any, **others: Any) -> None:
        if self._writer is not None:
            try:
                getattr(self._writer, method)(*arguments, **others)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        self._warn(f"{cannot_write(self._folder, error)}; the run goes on without TensorBoard")
