"""Writes TensorBoard's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class TensorBoard:
    """Tracks by TensorBoard's files, as `trackers.py` describes it; shows samples as well.

    Args:
        resumed_step: what an earlier process wrote for later steps is hidden.
    """

    def __init__(self, resumed_step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, and only rank 0 needs it

        self._Summary, self._Writer, self._begin = Summary, SummaryWriter, resumed_step + 1

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        self._writer: Any = self._Writer(str(run_dir / "tensorboard"), purge_step=self._begin)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes all in one event: thousands of them, with hundreds of workers."""
        written = [self._Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.file_writer.add_summary(self._Summary(value=written), step)
        self._writer.flush()

    def samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        for number, of in enumerate(samples):
            text = f"**{of['language']}** {of['source']}\n\n* reference: {of['reference']}\n* output: {of['output']}"
            self._writer.add_text(f"samples/{number}", text, step)

    def picture(self, name: str, path: Path) -> None: ...  # it shows none in SVG

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()
