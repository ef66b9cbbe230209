"""Defines where a part of the proof runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import Row, run_command

AT_ONCE = 4  # commands that share a GPU where only results matter


class Site(NamedTuple):
    """Describes where a part runs.

    Attributes:
        part: its name.
        device: "cuda", or "cpu" to try the parts without a GPU.
        tiny: sizes for tests.
        folder: a directory for the part's own use.
    """

    part: str
    device: str
    tiny: bool
    folder: Path

    @property
    def gpus(self) -> int:
        return torch.cuda.device_count() if self.device == "cuda" else 0

    def run(self, command: str, words: Sequence[str], codes: Sequence[int] = (0,)) -> str:
        """Runs a command on this site's device, in its folder, and returns its output; see `run_command`."""
        return run_command(command, [f"pipeline.device={self.device}", *words], self.folder, codes)

    def side_by_side(self, work: Callable[[Sequence[str]], Row], cases: Sequence[Sequence[str]]) -> Iterator[Row]:
        """Does ``work`` for every case, on a GPU several at a time: nothing is timed here.

        Yields the results; of a case that fails what it said last.
        """

        def attempt(case: Sequence[str]) -> Row:
            try:
                return work(case)
            except (SystemExit, Exception) as error:
                return {"what": " ".join(case), "ok": False, "why": str(error).strip().rpartition("\n")[2]}

        with ThreadPoolExecutor(AT_ONCE if self.device == "cuda" else 1) as threads:
            yield from threads.map(attempt, cases)
