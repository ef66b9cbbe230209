"""Reads the files of finished, stopped and broken runs, to compare them: of a sweep, and for gpipe-report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from gpipe_cli.disk import read_rows, skipped
from gpipe_cli.typed_section import flat

ERROR_FILE = "error.txt"  # in the run directory of a failed run
RUN_FILES = ("summary.json", "metrics.jsonl", ERROR_FILE, ".hydra/config.yaml")  # one of them makes a folder a run
MEASURED_STEPS = 200  # of an unfinished run: the last ones, as summary.json of a finished one


@dataclass(frozen=True)
class FinishedRun:
    """Holds one run, as its directory has it.

    Attributes:
        status: "done", "stopped" (it saved first), "not finished, 7 steps on record" or "failed".
        settings: the whole configuration, flat: "pipeline.K" to value.
        words: the overrides, as they were typed.
        error: of a failed run, in one line.
        outcome: the status with the error and what cannot be read.
        summary: of summary.json, or of an unfinished run what is known: K, M, loss, examples_per_second.
    """

    folder: Path
    status: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()
    error: str | None = None
    outcome: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def typed(self) -> dict[str, str]:
        """Returns the overrides: key to what was typed."""
        return {key.lstrip("+~"): value for key, _, value in (word.partition("=") for word in self.words)}

    @property
    def evaluation(self) -> dict[str, float]:
        """Returns the last evaluation's numbers, without single languages."""
        scores = (self.summary.get("evaluation") or {}).items()
        return {name: score for name, score in scores if "/" not in name and isinstance(score, (int, float))}


def find_runs(paths: Sequence[Path]) -> tuple[list[FinishedRun], list[str]]:
    """Finds the runs in files and directories; a sweep's directory stands for all its jobs.

    Returns:
        The runs, each once, in the order of the paths, a sweep's jobs by their number; and a message for each path
        that holds none.
    """
    folders: dict[Path, None] = {}
    problems = []
    for path in paths:
        found = list(_folders(path))
        if not found:
            empty = "holds no run of gpipe-train (no summary.json, no metrics.jsonl)"
            problems.append(f"{path} {empty if path.exists() else 'is not there'}")
        folders |= dict.fromkeys(found)
    return [read_run(folder) for folder in folders], problems


def _folders(path: Path) -> Iterator[Path]:
    folder = path.parent if path.is_file() else path
    if any((folder / name).is_file() for name in RUN_FILES):
        yield folder
    elif folder.is_dir():
        for below in sorted((below for below in folder.iterdir() if below.is_dir()), key=_number):
            yield from _folders(below)


def _number(folder: Path) -> tuple[float, str]:
    """Returns a sort key: jobs of a sweep are called ``12_overrides``."""
    number = folder.name.partition("_")[0]
    return (int(number) if number.isdigit() else float("inf"), folder.name)


def read_run(folder: Path, running: bool = False) -> FinishedRun:
    """Reads a run directory.

    Args:
        running: its figures are not read: what summary.json says is of the run that this one continues.
    """
    broken: list[str] = []
    settings = flat(_read(folder / ".hydra" / "config.yaml", yaml.safe_load, dict, broken) or {})
    words = _read(folder / ".hydra" / "overrides.yaml", yaml.safe_load, list, broken) or []
    summary = {} if running else _read(folder / "summary.json", json.loads, dict, broken)
    rows, damaged = read_rows(folder / "metrics.jsonl") if summary is None else ([], [])
    if damaged:
        broken.append(skipped(Path("metrics.jsonl"), damaged))
    error = _error(folder / ERROR_FILE)
    status = "failed" if error else "running" if running else _status(summary, rows)
    if summary is None:
        speeds = [row["examples_per_second"] for row in rows[-MEASURED_STEPS:] if row.get("examples_per_second")]
        summary = {"loss": rows[-1].get("loss") if rows else None}
        summary["examples_per_second"] = median(speeds) if speeds else None
    planned = {name: settings.get(f"pipeline.{name}") for name in ("K", "M")}
    outcome = "; ".join([status if error is None else f"{status}: {error}", *broken])
    return FinishedRun(folder, status, settings, [str(word) for word in words], error, outcome, {**planned, **summary})


def _error(path: Path) -> str | None:
    """Returns the exception's line of a traceback, or the first line of another text; None without the file."""
    if not path.is_file():
        return None
    lines = path.read_text(errors="replace").strip().splitlines() or ["no message"]
    traceback = any(line.startswith("Traceback ") for line in lines)
    said = [line for line in lines if line and not line[0].isspace() and not line.startswith("log: ")]
    return said[-1] if traceback and said else lines[0]


def _status(summary: Any, rows: Sequence[Any]) -> str:
    if summary is None:
        return f"not finished, {len(rows)} steps on record"
    return "stopped" if summary.get("stopped_by") == "request" else "done"


def _read(path: Path, parse: Any, kind: type, broken: list[str]) -> Any:
    if not path.is_file():
        return None
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        found = None
    if not isinstance(found, kind):
        broken.append(f"{path.name} cannot be read")
        return None
    return found
