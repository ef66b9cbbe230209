"""Defines a part of the proof on a GPU, and the site where parts run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.common import run_command

Row = dict[str, Any]  # a finding; with a key "ok" it is a check
T = TypeVar("T")
AT_ONCE = 4  # commands that share a GPU where only results matter


class Skipped(Exception):
    """Raised by a part that this machine cannot run; the message says why."""


@dataclass(frozen=True)
class Site:
    """Describes where a part runs.

    Attributes:
        part: its name.
        device: "cuda", or "cpu" to try the parts without a GPU.
        tiny: sizes for tests.
        folder: an empty directory for the part's own use.
    """

    part: str
    device: str
    tiny: bool
    folder: Path

    @property
    def gpus(self) -> int:
        return torch.cuda.device_count() if self.device == "cuda" else 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def run(self, command: str, words: Sequence[str], codes: Sequence[int] = (0,)) -> str:
        """Runs a command on this site's device, in its folder, and returns its output; see `run_command`."""
        return run_command(command, [f"pipeline.device={self.device}", *words], self.folder, codes)

    def side_by_side(self, work: Callable[[T], Row], cases: Sequence[T]) -> Iterator[Row]:
        """Does ``work`` for every case, on a GPU several at a time: nothing is timed here.

        Yields the results; of a case that fails what it said last.
        """

        def attempt(case: T) -> Row:
            try:
                return work(case)
            except (SystemExit, Exception) as error:
                return {"what": str(case), "ok": False, "why": str(error).strip().rpartition("\n")[2]}

        with ThreadPoolExecutor(AT_ONCE if self.device == "cuda" else 1) as threads:
            yield from threads.map(attempt, cases)


@dataclass(frozen=True)
class Part:
    """Describes a part: a process of its own with a limit of time.

    Attributes:
        title: for the page.
        entry: "module:function" of this package; the function yields rows as they are found. Imported by the part's
            process alone, so that what breaks there ends no other part.
        seconds: that it is expected to take on a GPU; it is not begun with less time left.
        limit: seconds after which it is killed; what it had found until then stays.
    """

    name: str
    title: str
    entry: str
    seconds: float
    limit: float

    def find(self, site: Site) -> Iterator[Row]:
        module, _, function = self.entry.partition(":")
        found: Iterator[Row] = getattr(import_module(f"benchmarks.gpu.{module}"), function)(site)
        return found
