"""Formats numbers, tables and paths as text, the same on the console and in train.log."""

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

NUMBER = re.compile(r"\d[\d.,:]*(e[+-]?\d+)?( ?%| \S+)?$")  # as text: 1,024 or 21.3 % or 8.05 s, not 1f1b


def number(value: object, digits: int = 4) -> str:
    """Returns a number in few characters (12,345, 3.2146, 2.1e-04), another value as it is, None as "-"."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def plural(number: int, word: str) -> str:
    """Returns a number with its noun: "1 cell", "1,024 cells"."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def percent(share: object) -> str:
    """Returns a share of 1 as "21.3 %"."""
    return f"{100 * share:.1f} %" if isinstance(share, (int, float)) and math.isfinite(share) else "-"


def size_text(size: float, unit: str = "B") -> str:
    """Returns bytes, or another unit, in units of a thousand: 12.3 GB."""
    for prefix in ("", "K", "M", "G", "T"):
        if size < 999.5 or prefix == "T":
            return f"{size:.3g} {prefix}{unit}" if prefix else f"{size:.0f} {unit}"
        size /= 1000
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """Returns seconds as 12.3 ms or 4.56 s."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def duration(seconds: float) -> str:
    """Returns seconds as 3.2 s (below ten), 0:17, 4:12 or 1:02:03."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table with aligned columns; columns of numbers are aligned to the right."""
    cells = [[number(value) for value in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(columns)]
    aligned = [str.rjust if all(is_number(row[i]) for row in rows) else str.ljust for i in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *cells]
    placed = ([align(cell, width) for align, cell, width in zip(aligned, line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in placed)


def is_number(value: object) -> bool:
    """Returns whether a value is a number, also one written as "21.3 %", or stands for a missing one."""
    return value in (None, "", "-") or isinstance(value, (int, float)) or bool(NUMBER.match(str(value)))


def relative_paths(text: str) -> str:
    """Returns the text with paths below the current directory shortened."""
    here = str(Path.cwd()).rstrip("/")
    return text.replace(f"{here}/", "") if here else text


def command_name() -> str:
    """Returns the command that was typed: several commands share the code that runs them."""
    stem = Path(sys.argv[0]).stem
    return stem if stem.startswith("gpipe-") else "gpipe-train"
