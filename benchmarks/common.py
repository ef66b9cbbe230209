"""What the benchmarks share: command line, workers, tables, and a description of the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpipe_cli.launch.supervisor import Job, launch

PRELOAD = ("torch", "torch.distributed")


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark has; the module's docstring is the description."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, metavar="FILE.json", help="write the figures there, too")
    made.add_argument("--quick", action="store_true", help="smaller and shorter: a first impression")
    return made


def run_workers(entry: str, workers: int, config: Mapping[str, Any], preload: Sequence[str] = ()) -> Any:
    """Runs ``entry(context, config)`` on so many processes with one thread each; returns rank 0's result."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        job = Job(Path(directory), workers, entry, dict(config), preload=(*PRELOAD, *preload))
        return launch(job, lambda event: None)


@dataclass
class Report:
    """One table, printed as Markdown while it grows, and what stands in the JSON file.

    Attributes:
        columns: title of each column to the format of its numbers, e.g. ``{"step, s": ".3f", "remat": ""}``.
    """

    columns: Mapping[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
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
        for note in notes:
            print(note)
        if output is not None:
            content = {"machine": machine(), "rows": self.rows, "notes": list(notes)}
            output.write_text(json.dumps(content, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Where the figures were taken; the load tells whether others were at work there."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def machine_line() -> str:
    facts = machine()
    return (
        f"{facts['processor']}, {facts['cores']} cores, load {facts['load']} at the start; "
        f"Python {facts['python']}, torch {facts['torch']}"
    )


def processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
