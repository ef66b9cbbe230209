"""Keeps what every part has found in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .part import Row

DONE, FAILED, LATE, SKIPPED = "passed", "failed", "not finished", "not possible here"


@dataclass(frozen=True)
class Record:
    """Holds the outcome of one part.

    Attributes:
        status: one of `DONE`, `FAILED`, `LATE`, `SKIPPED`.
        where: name of the device.
        torch: its release.
        date: day of the run, as 2026-11-23.
        why: reason for a status other than `DONE`; the end of the part's output where it failed.
    """

    status: str
    where: str
    torch: str
    date: str
    seconds: float
    rows: Sequence[Row] = ()
    why: str = ""


@dataclass
class Records:
    """Holds the records of all parts by name; written after each of them.

    Args:
        path: of the JSON file; what it holds already is kept.
    """

    path: Path
    of: dict[str, Record] = field(init=False)

    def __post_init__(self) -> None:
        self.of = {}
        if self.path.is_file():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            self.of = {name: Record(**record) for name, record in found["parts"].items()}

    def keep(self, name: str, record: Record) -> None:
        """Replaces a part's record and writes the file."""
        self.of[name] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parts = {each: asdict(kept) for each, kept in self.of.items()}
        temporary = self.path.with_name(f"{self.path.name}.partial")
        temporary.write_text(json.dumps({"parts": parts}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)

    def is_settled(self, name: str, where: str, torch: str) -> bool:
        """Returns whether the part needs no run on this device with this release of torch."""
        record = self.of.get(name)
        return (
            record is not None and record.status in (DONE, SKIPPED) and (record.where, record.torch) == (where, torch)
        )
