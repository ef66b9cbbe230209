"""What the benchmarks share: command line, paired measurements, tables."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpipe_cli.bench.machine import machine, machine_line, stolen

WARM_UP = 2  # rounds that do not count


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark has; the module's docstring is the description."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, metavar="FILE.json", help="write the figures there, too")
    made.add_argument("--quick", action="store_true", help="smaller and shorter: a first impression")
    return made


def seconds_in_turns(contenders: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """What each contender returns (its own seconds), by repetition.

    In every round each of them has one turn, so that what disturbs the machine disturbs all alike; every other round
    goes backwards.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(WARM_UP + repetitions):
        for name in list(contenders) if repetition % 2 else reversed(list(contenders)):
            taken = contenders[name]()
            if repetition >= WARM_UP:
                seconds[name].append(taken)
    return seconds


def slower_by(seconds: Sequence[float], reference: Sequence[float]) -> tuple[float, str]:
    """How much more than the reference in the same round: the median as a share, and the quartiles as text."""
    shares = [mine / other - 1 for mine, other in zip(seconds, reference, strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4)
    return middle, f"{low:+.2%} … {high:+.2%}"


@dataclass
class Report:
    """One table, printed as Markdown while it grows, and what stands in the JSON file.

    Attributes:
        columns: title of each column to the format of its numbers, e.g. ``{"step, s": ".3f", "remat": ""}``.
    """

    columns: Mapping[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    _stolen: tuple[int, int] | None = None

    def begin(self) -> None:
        self._stolen = stolen()
        print(f"\n{machine_line()}\n")
        print("| " + " | ".join(self.columns) + " |")
        print("|" + "---|" * len(self.columns), flush=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """``row`` by column title; None prints as a dash. Further keys go to the JSON file only."""
        self.rows.append(dict(row))
        cells = ("–" if row[title] is None else format(row[title], form) for title, form in self.columns.items())
        print("| " + " | ".join(cells) + " |", flush=True)

    def end(self, output: Path | None, notes: Sequence[str] = ()) -> None:
        """Prints the notes below the table and writes everything to ``output``."""
        print()
        notes = [*notes, *self._what_others_took()]
        for note in notes:
            print(note)
        if output is not None:
            content = {"machine": machine(), "rows": self.rows, "notes": notes}
            output.write_text(json.dumps(content, indent=1) + "\n")

    def _what_others_took(self) -> list[str]:
        """A note, where the system tells."""
        before, now = self._stolen, stolen()
        if before is None or now is None or now[1] == before[1]:
            return []
        share = (now[0] - before[0]) / (now[1] - before[1])
        return [f"meanwhile the host of this virtual machine gave {share:.1%} of its processors' time to others"]
