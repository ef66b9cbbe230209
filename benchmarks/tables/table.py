"""Holds a table of figures with its notes and curves, and writes it as a page, JSON and a plot."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpipe_cli.disk import write_whole
from gpipe_cli.svg import Drawing
from gpipe_cli.terminal.document import Document, Grid, Lines

Say = Callable[[str], None]  # reports to the user what is being measured


@dataclass(frozen=True)
class Table:
    """Holds the rows that one command measured.

    Attributes:
        name: stem of the files' names, as "table2".
        columns: title of each column to the format of its values, e.g. ``{"ours": ".2f", "remat": ""}``.
        rows: values by title; further keys are for the JSON file only.
        notes: the protocol and what is remarkable, a sentence or two each.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    drawing: Drawing | None = None

    def document(self, where: str = "") -> Document:
        """Returns the table with its notes and its plot; ``where``: the machine that the figures are from."""
        grid = Grid(list(self.columns), [cells(self.columns, row) for row in self.rows])
        plots = [] if self.drawing is None else [self.drawing]
        return Document(self.title, [grid, Lines(self.notes, "* "), *plots, Lines([where] * bool(where))])

    def write(self, folder: Path, where: str = "", about: Mapping[str, Any] | None = None) -> list[Path]:
        """Writes ``NAME.html`` and ``.json`` and the plot's ``.svg``; returns the files.

        Args:
            where: the machine that the figures are from.
            about: entries of the JSON file in front of notes and rows.

        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        page, figures, picture = (folder / f"{self.name}.{end}" for end in ("html", "json", "svg"))
        self.document(where).save(page)
        content = {"title": self.title, **(about or {}), "notes": list(self.notes), "rows": self.rows}
        write_whole(figures, json.dumps(content, indent=1) + "\n")
        if self.drawing is not None:
            self.drawing.save(picture)
        return [page, figures, *([picture] if self.drawing is not None else [])]


def cells(columns: Mapping[str, str], row: Mapping[str, Any]) -> list[object]:
    """Returns the values of a row as they are printed; None stays None, which prints as a dash."""
    values = ((row.get(title), form) for title, form in columns.items())
    return [value if value is None or not form else format(value, form) for value, form in values]
