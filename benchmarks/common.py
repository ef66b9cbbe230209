"""Defines the command line and the printed table that all benchmarks share."""

import json
import resource
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpipe_cli.benchmarks.tables.table import cells
from gpipe_cli.benchmarks.tables.workers import machine, machine_line
from gpipe_cli.terminal.text import number

WARM_UP = 2  # rounds that do not count
ROOT = Path(__file__).parents[1]
Row = dict[str, Any]


def parser(description: str | None) -> ArgumentParser:
    """Returns a command line with the options that every benchmark has; the module's docstring describes it."""
    made = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, metavar="FILE.json", help="write the figures to this file, too")
    made.add_argument("--quick", action="store_true", help="smaller and shorter: a first impression")
    return made


def report(
    columns: Mapping[str, str],
    rows: Iterable[Row],
    output: Path | None,
    notes: Callable[[Sequence[Row]], Sequence[str]] = lambda rows: (),
) -> None:
    """Prints rows as Markdown while they are measured, then notes, and writes all of it to ``output``.

    Args:
        columns: title of each column to the format of its values, as in `Table`; further keys of a row go to the file
            only.
        notes: makes the notes from all rows.
    """
    kept = []
    print(f"\n{machine_line()}\n\n{markdown_table(list(columns), [])}", flush=True)
    for row in rows:
        kept.append(row)
        print(markdown_table(list(columns), [cells(columns, row)]).splitlines()[-1], flush=True)
    said = notes(kept)
    print("\n".join(["", *said]))
    if output is not None:
        output.write_text(json.dumps({"machine": machine(), "rows": kept, "notes": list(said)}, indent=1) + "\n")


def children_seconds() -> float:
    """Returns the processor seconds of all commands that this process has run so far, and of their children."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [columns, *([number(value) for value in row] for row in rows)]
    head, *body = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def table_of(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns a Markdown table of rows by the names of their columns; what a row lacks is a dash."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return markdown_table(columns, [[row.get(name, "–") for name in columns] for row in rows])
