"""Reads the files of finished, stopped and broken runs, and compares them in one table: a sweep's, gpipe-report's."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from gpipe_cli.disk import read_bytes
from gpipe_cli.json_files import DamagedJson, read_json, read_rows, skipped
from gpipe_cli.svg import Curve, Drawing, plot
from gpipe_cli.terminal.document import Block, Cell, Document, Grid, Lines
from gpipe_cli.terminal.text import number, percent
from gpipe_cli.typed_section import flat

ERROR_FILE = "error.txt"  # in the run directory of a failed run
RUN_FILES = ("summary.json", "metrics.jsonl", ERROR_FILE, ".hydra/config.yaml")  # one of them makes a folder a run
MOST_TEXT = 1 << 20  # bytes that are read of other files than those of figures: YAML is slow to read
MEASURED_STEPS = 200  # of an unfinished run: the last ones, as summary.json of a finished one
GRID = ("pipeline.K", "pipeline.M")  # have columns of their own
NO_DIFFERENCE = ("name", "pipeline.workers")  # keys that do not make another experiment
FIGURES = ("K", "M", "workers", "loss", "examples_per_second", "bubble", "bubble_predicted", "wall_seconds")
SETTINGS_AT_MOST = EVALUATIONS_AT_MOST = 4  # columns; `facts` has all
NOTES = (
    "×: examples/s in units of the run with the smallest K, then M, of those that differ in nothing else; ideal: "
    "K·M/(M+K−1) in the same unit, with the number of workers for K where cells share them.",
    "bubble: share of the workers' time without computing; predicted: simulated from the measured times.",
)


@dataclass(frozen=True)
class FinishedRun:
    """Holds what a run directory says of its run.

    Attributes:
        status: "done", "stopped" (it saved first), "not finished, 7 steps on record" or "failed".
        settings: the whole configuration, flat: "pipeline.K" to value.
        words: the overrides, as they were typed.
        config_dir: the folder of `--config-dir`; None without.
        error: reason for which the run failed, in one line; None if it did not.
        outcome: the status with the error and what cannot be read.
        summary: content of summary.json, or what is known of an unfinished run: K, M, loss, examples_per_second.
    """

    folder: Path
    status: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()
    error: str | None = None
    outcome: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    config_dir: str | None = None

    @property
    def typed(self) -> dict[str, str]:
        """Returns the value typed for each key."""
        return {key.lstrip("+~"): value for key, _, value in (word.partition("=") for word in self.words)}

    def value(self, key: str) -> Any:
        """Returns the value of a configuration key, or the typed option of a Hydra group."""
        return self.settings.get(key, self.typed.get(key))

    @property
    def evaluation(self) -> dict[str, float]:
        """Returns the last evaluation's scores, without those of single languages."""
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
    """Yields the run directories in a folder and below, or the one that a file lies in."""
    folder = path.parent if path.is_file() else path
    if any((folder / name).is_file() for name in RUN_FILES):
        yield folder
    elif folder.is_dir():
        for below in sorted((below for below in folder.iterdir() if below.is_dir()), key=_number):
            yield from _folders(below)


def _number(folder: Path) -> tuple[float, str]:
    """Returns a sort key: a sweep's jobs, called ``12_overrides``, by number; others after them, by name."""
    number = folder.name.partition("_")[0]
    return (int(number) if number.isdigit() else float("inf"), folder.name)


def read_run(folder: Path, running: bool = False) -> FinishedRun:
    """Reads a run directory.

    Args:
        running: the run has not ended. Its figures are not read, because a summary.json is that of the run that this
            one continues.
    """
    broken: list[str] = []
    record = folder / ".hydra"
    settings = flat(_read_yaml(record / "config.yaml", dict, broken))
    words = _read_yaml(record / "overrides.yaml", list, broken)
    sources = flat(_read_yaml(record / "hydra.yaml", dict, [])).get("hydra.runtime.config_sources") or ()
    config_dir = next((str(of["path"]) for of in sources if str(of["provider"]).endswith("command-line")), None)
    status, figures = ("running", {}) if running else _ending(folder, broken)
    error = _error(folder / ERROR_FILE)
    status = status if error is None else "failed"
    planned = {key.removeprefix("pipeline."): settings[key] for key in GRID if isinstance(settings.get(key), int)}
    outcome = "; ".join([status if error is None else f"{status}: {error}", *broken])
    typed_words = [str(word) for word in words]
    return FinishedRun(folder, status, settings, typed_words, error, outcome, {**planned, **figures}, config_dir)


def _ending(folder: Path, broken: list[str]) -> tuple[str, dict[str, Any]]:
    """Returns a run's status and its figures: summary.json, or what the steps of an unfinished run say.

    A file that cannot be read adds a line to ``broken``.
    """
    try:
        summary = read_json(folder / "summary.json", dict[str, Any])
        return "stopped" if summary.get("stopped_by") == "request" else "done", summary
    except FileNotFoundError:
        pass
    except (OSError, DamagedJson) as damage:
        broken.append(str(damage))
    rows, damaged = read_rows(folder / "metrics.jsonl")
    if damaged:
        broken.append(skipped(Path("metrics.jsonl"), damaged))
    speeds = [row["examples_per_second"] for row in rows[-MEASURED_STEPS:] if row.get("examples_per_second")]
    loss = rows[-1].get("loss") if rows else None
    figures = {"loss": loss, "examples_per_second": median(speeds) if speeds else None}
    return f"not finished, {len(rows)} steps on record", figures


def _error(path: Path) -> str | None:
    """Returns the exception's line of a traceback, or the first line of another text; None without the file."""
    if not path.is_file():
        return None
    lines = read_bytes(path, MOST_TEXT).decode(errors="replace").strip().splitlines() or ["no message"]
    traceback = any(line.startswith("Traceback ") for line in lines)
    said = [line for line in lines if line and not line[0].isspace() and not line.startswith("log: ")]
    return said[-1] if traceback and said else lines[0]


def _read_yaml(path: Path, kind: type, broken: list[str]) -> Any:
    """Returns the content of a YAML file, or an empty ``kind`` if it is missing or cannot be read.

    A file that cannot be read adds a line to ``broken``.
    """
    if not path.is_file():
        return kind()
    try:
        found = yaml.safe_load(read_bytes(path, MOST_TEXT))
    except (OSError, yaml.YAMLError):
        found = None
    if isinstance(found, kind):
        return found
    broken.append(f"{path.name} cannot be read")
    return kind()


# -- compared ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunTable:
    """Holds figures of runs.

    Attributes:
        facts: each run's directory, settings that differ, and figures in full precision.
        differing: keys of the configuration whose values differ.
    """

    facts: list[dict[str, Any]]
    differing: list[str]

    def document(self, folder: Path) -> Document:
        """Returns the table as a document, with links to the runs' own pages, the plot and the meaning of its columns.

        Args:
            folder: place of the document; links are relative to it.
        """
        others = [key for key in self.differing if key not in GRID]
        settings, hidden = others[:SETTINGS_AT_MOST], others[SETTINGS_AT_MOST:]
        scores = list(dict.fromkeys(name for run in self.facts for name in run["evaluation"]))[:EVALUATIONS_AT_MOST]
        columns = ["run", *settings, "K", "M", "loss", "examples/s", "×", "ideal", "bubble", "predicted", *scores]
        rows: list[list[object]] = []
        for run in self.facts:
            page, name = Path(run["run"]) / "report.html", run["name"]
            row = [Cell(name, quote(os.path.relpath(page, folder))) if page.is_file() else name]
            row += [run["settings"][key] for key in settings]
            row += [run[key] for key in ("K", "M", "loss", "examples_per_second")]
            row += [run[key] and f"{run[key]:.2f}" for key in ("normalised", "ideal")]
            row += [percent(run[key]) for key in ("bubble", "bubble_predicted")]
            rows.append([*row, *(run["evaluation"].get(score) for score in scores), run["outcome"]])
        drawing = self.drawing()
        plots = [] if drawing is None else [drawing]
        differ = [f"The runs also differ in {', '.join(hidden)}."] if hidden else []
        notes = Lines([*NOTES, *differ], "* ")
        blocks: list[Block] = [Grid([*columns, "status"], rows), *self.matrix(), *plots, notes]
        return Document(f"{len(rows)} runs of gpipe-train", blocks)

    def matrix(self) -> list[Grid]:
        """Returns a grid of loss and seconds by K and M, if the runs differ in both and in nothing else."""
        if {*self.differing} != {*GRID}:
            return []
        runs = {(run["K"], run["M"]): run for run in self.facts if run["wall_seconds"]}
        all_K, all_M = ({key[axis] for key in runs} for axis in (0, 1))
        columns = sorted(all_M)

        def entry(K: int, M: int) -> str:
            run = runs.get((K, M))
            return "" if run is None else f"{number(run['loss'], 4)} in {run['wall_seconds']:.0f} s"

        rows = [[f"K={K}", *(entry(K, M) for M in columns)] for K in sorted(all_K)]
        return [Grid(["loss, seconds of a run", *(f"M={M}" for M in columns)], rows)]

    def drawing(self) -> Drawing | None:
        """Plots measured and ideal throughput over K, a panel for each M and setting that differs.

        Returns None if no panel has two K.
        """
        panels: dict[str, list[tuple[float, float, float]]] = {}
        for run in self.facts:
            if run["normalised"] is not None:
                others = [str(value) for key, value in run["settings"].items() if key not in GRID]
                panel = ", ".join([f"M={run['M']}", *others])
                panels.setdefault(panel, []).append((float(run["K"]), run["normalised"], run["ideal"]))
        curves = []
        for panel, points in panels.items():
            ideals = sorted({K: ideal for K, _, ideal in points}.items())
            if len(ideals) > 1:  # a curve needs two K
                curves.append(Curve(panel, "ideal, K·M/(M+K−1)", "ideal", ideals))
                curves.append(Curve(panel, "measured", "ours", sorted((K, speed) for K, speed, _ in points)))
        return plot(curves, ("cells K", "normalised throughput"), "Throughput of the runs") if curves else None


def compare(runs: Sequence[FinishedRun]) -> RunTable:
    """Compares runs: settings that differ, figures, and throughput relative to a reference.

    The reference of a run has the smallest K, then M, of the runs that differ from it in nothing else.
    """
    differing = differing_keys(runs)
    others = [key for key in differing if key not in GRID]
    references: dict[tuple[str, ...], FinishedRun] = {}

    def group(run: FinishedRun) -> tuple[str, ...]:
        return tuple(str(run.value(key)) for key in others)

    for run in sorted(filter(_speed, runs), key=lambda run: (run.summary["K"], run.summary["M"])):
        references.setdefault(group(run), run)
    facts = []
    for run, name in zip(runs, short_names(runs), strict=True):
        speed, ideal = _compared(run, references.get(group(run)))
        settings = {key: run.value(key) for key in differing}
        about = {name: getattr(run, name) for name in ("status", "error", "outcome", "evaluation")}
        about |= {name: run.summary.get(name) for name in FIGURES} | {"normalised": speed, "ideal": ideal}
        facts.append({"run": str(run.folder), "name": name, "settings": settings, **about})
    return RunTable(facts, differing)


def differing_keys(runs: Sequence[FinishedRun]) -> list[str]:
    """Returns the configuration's keys whose values differ between the runs.

    An interpolation (``${...}``) is left out: the key that it refers to counts. Where every command line chose an
    option of a Hydra group (``optimizer=adam``), that choice is listed in place of the group's keys, except keys that
    every command line sets, too.
    """
    known = [run for run in runs if run.settings]  # those whose configuration can be read
    all_typed = [key for key in (known[0].typed if known else ()) if all(key in run.typed for run in known)]
    values = {key: {str(run.value(key)) for run in known} for run in known for key in (*all_typed, *run.settings)}
    differing = [key for key, found in values.items() if len(found) > 1 and not any("${" in value for value in found)]
    groups = tuple(f"{key}." for key in differing)
    return [key for key in differing if key not in NO_DIFFERENCE and (key in all_typed or not key.startswith(groups))]


def short_names(runs: Sequence[FinishedRun]) -> list[str]:
    """Returns a short label for each run: the job's number within a sweep, else the folder's name.

    Labels that would be equal have the parent folder's name before them.
    """
    jobs = [re.match(r"\d+(?=_|$)", run.folder.name) for run in runs]
    names = [run.folder.name if job is None else job[0] for run, job in zip(runs, jobs, strict=True)]
    return [
        name if names.count(name) == 1 else f"{run.folder.parent.name}/{name}"
        for name, run in zip(names, runs, strict=True)
    ]


def ideal_throughput(K: int, M: int, reference: tuple[int, int] = (2, 1)) -> float:
    """Returns K·M / (M+K-1), K equal cells against one device, messages free, in units of the reference's (K, M)."""
    speed, unit = (cells * count / (count + cells - 1) for cells, count in ((K, M), reference))
    return speed / unit


def _compared(run: FinishedRun, reference: FinishedRun | None) -> tuple[float | None, float | None]:
    """Returns the measured and the ideal throughput in units of the reference's; None where one of them is unknown.

    With W workers a pipeline of K cells cannot be faster than one of W cells.
    """
    speed, unit = _speed(run), reference and _speed(reference)
    if reference is None or not speed or not unit:
        return None, None
    width, reference_width = (each.summary.get("workers") or each.summary["K"] for each in (run, reference))
    return speed / unit, ideal_throughput(width, run.summary["M"], (reference_width, reference.summary["M"]))


def _speed(run: FinishedRun) -> float | None:
    """Returns the examples per second of a run whose K and M are known, else None."""
    known = all((run.summary.get(name) or 0) > 0 for name in ("K", "M"))
    return run.summary.get("examples_per_second") if known else None
