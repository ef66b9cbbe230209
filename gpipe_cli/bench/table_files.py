"""Writes a table down: Markdown for people, JSON for programs, a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .plots import draw
from .tables import Table


def write_table(
    table: Table, markdown: str, folder: Path, where: str | None = None, about: Mapping[str, Any] | None = None
) -> list[Path]:
    """``NAME.md``, ``NAME.json`` and the plot's ``NAME.png`` and ``NAME.svg``; returns the files.

    Args:
        markdown: the columns and rows as Markdown.
        where: the last line of the Markdown: the machine that the figures are from.
        about: entries of the JSON file in front of the notes and `Table.facts`.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text, figures = folder / f"{table.name}.md", folder / f"{table.name}.json"
    notes = "\n".join(f"* {note}" for note in table.notes)
    paragraphs = [f"# {table.title}", markdown, notes, *([where] if where else [])]
    text.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    content = {**(about or {}), "notes": list(table.notes), **table.facts}
    figures.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return [text, figures, *draw(table, folder)]
