"""Keeps what every part has found in one JSON file, and beside it a page of tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpipe_cli.terminal.text import markdown_table

from .part import Row
from .parts import PARTS

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

    def settles(self, where: str, torch: str) -> bool:
        """Returns whether the part needs no run on this device with this release of torch."""
        return self.status in (DONE, SKIPPED) and (self.where, self.torch) == (where, torch)


class Records:
    """Holds the records of all parts by name; both files are written after each part.

    Args:
        path: of the JSON file; what it holds already is kept. The page has its name and ends in .md.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.page = path, path.with_suffix(".md")
        self.of: dict[str, Record] = {}
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            self.of = {name: Record(**record) for name, record in found.items()}

    def keep(self, name: str, record: Record) -> None:
        """Replaces a part's record and writes both files."""
        self.of[name] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.partial")
        content = {each: asdict(kept) for each, kept in self.of.items()}
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)
        self.page.write_text("\n".join(self._lines()).rstrip() + "\n", encoding="utf-8")

    def _lines(self) -> Iterator[str]:
        yield "# What has run on a GPU\n"
        for part in PARTS:
            if (record := self.of.get(part.name)) is None:
                yield f"## {part.name}\n\n{part.title}: not run yet\n"
                continue
            place = f"{record.where}, torch {record.torch}, {record.date}, {record.seconds:.0f} s"
            why = f": {record.why.splitlines()[-1]}" if record.why else ""
            yield f"## {part.name}\n\n{part.title}: **{record.status}**{why} ({place})\n"
            if record.rows:
                columns = list(dict.fromkeys(key for row in record.rows for key in row))
                yield markdown_table(columns, [list(_cells(row, columns)) for row in record.rows]) + "\n"


def _cells(row: Row, columns: Sequence[str]) -> Iterator[object]:
    for value in map(row.get, columns):
        yield ("yes" if value else "**no**") if isinstance(value, bool) else value
