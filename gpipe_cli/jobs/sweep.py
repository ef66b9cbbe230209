"""Counts and names the jobs of a sweep, and makes the table of all jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, read_write

from gpipe_cli.terminal.runs import FIGURES, FinishedRun, read_run
from gpipe_cli.terminal.text import markdown_table, number, percent, text_table

LONGEST_NAME = 100  # file systems take 255 bytes, and people read less


def folder_name(*words: str | None) -> str:
    """Returns the first word that is not empty, as part of a folder's name (`${gpipe_name:...}` in conf/train.yaml)."""
    word = next((word for word in words if word), "run")
    return re.sub(r"[^\w.,=+\-\[\]]+", "_", str(word))[:LONGEST_NAME]


OmegaConf.register_new_resolver("gpipe_name", folder_name, replace=True)


@dataclass
class Sweep:
    """Describes the sweep that this process runs; `jobs` is None if the sweeper decides on the way."""

    directory: Path
    jobs: int | None


@dataclass(frozen=True)
class JobResult:
    """Holds one job of a sweep: its number, the overrides by key, and what it has left in its run directory."""

    number: int
    overrides: dict[str, str]
    run: FinishedRun


@dataclass(frozen=True)
class Spread:
    """Holds mean and sample standard deviation (n − 1) of one figure over seeds."""

    mean: float
    standard_deviation: float

    def __str__(self) -> str:
        spread = self.standard_deviation
        return f"{number(self.mean)} ± {number(spread, 2 if spread < 100 else 4)}"


@dataclass(frozen=True)
class Seeds:
    """Holds at least two finished jobs of a sweep that differ only in `seed`.

    Attributes:
        overrides: the swept keys that they share.
        jobs: in the order of the sweep.
    """

    overrides: dict[str, str | None]
    jobs: list[JobResult]

    @property
    def loss(self) -> Spread | None:
        return _spread([job.run.loss for job in self.jobs])

    @property
    def evaluation(self) -> dict[str, Spread]:
        """Returns the spread of each number that every job has."""
        names = self.jobs[0].run.evaluation
        spreads = {name: _spread([job.run.evaluation.get(name) for job in self.jobs]) for name in names}
        return {name: spread for name, spread in spreads.items() if spread is not None}


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(mean(known), stdev(known)) if len(known) == len(values) else None


current: Sweep | None = None  # set by hydra_callback.py, read by the command, which runs in the same process


def name_by_swept_keys(config: DictConfig) -> None:
    """Leaves keys with one value in all jobs out of the jobs' folder names, which are cut when they are long.

    Hydra composes each job from the sweep's overrides of `hydra`, so the setting is added there, before what is typed.
    """
    parsed = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
    fixed = [override.key_or_group for override in parsed if not override.is_sweep_override()]
    if 0 < len(fixed) < len(parsed):
        excluded = f"hydra.job.config.override_dirname.exclude_keys={fixed}"
        with read_write(config.hydra):
            config.hydra.overrides.hydra = [excluded, *config.hydra.overrides.hydra]


def count_jobs(overrides: Sequence[str]) -> int | None:
    """Returns the number of jobs of Hydra's own sweeper; None if an override has no fixed number of values."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    if all(
        override.is_choice_sweep() or override.is_range_sweep() for override in parsed if override.is_sweep_override()
    ):
        return len(BasicSweeper.split_arguments(parsed, None)[0])
    return None


def read_jobs(directory: Path) -> list[JobResult]:
    """Returns the jobs of a sweep, in order."""
    folders = [folder for folder in directory.iterdir() if (folder / ".hydra" / "overrides.yaml").is_file()]
    return sorted((_read_job(folder) for folder in folders), key=lambda job: job.number)


def _read_job(folder: Path) -> JobResult:
    prefix = folder.name.partition("_")[0]
    words = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text()) or []
    pairs = (word.lstrip("+").partition("=") for word in words)
    overrides = {key: value for key, _, value in pairs}
    return JobResult(int(prefix) if prefix.isdigit() else 0, overrides, read_run(folder))


def finish(sweep: Sweep) -> tuple[str, bool]:
    """Writes sweep.json and sweep.md; returns the table for the console and whether every job is done."""
    jobs = read_jobs(sweep.directory)
    columns, rows = _table(jobs)
    content = {
        "sweep": str(sweep.directory),
        "swept": _swept_keys(jobs),
        "jobs": [_as_json(job) for job in jobs],
        "over_seeds": [_seeds_as_json(seeds) for seeds in over_seeds(jobs)],
    }
    (sweep.directory / "sweep.json").write_text(json.dumps(content, indent=1) + "\n")
    (sweep.directory / "sweep.md").write_text(markdown_table(columns, rows) + "\n")
    missing = (sweep.jobs or 0) - len(jobs)
    text = text_table(columns, rows) + (f"\n{missing} more were not started" if missing > 0 else "")
    return text, bool(jobs) and missing <= 0 and all(job.run.status == "done" for job in jobs)


def _swept_keys(jobs: Sequence[JobResult]) -> list[str]:
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    return [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1]


def over_seeds(jobs: Sequence[JobResult]) -> list[Seeds]:
    """Returns finished jobs, grouped by all swept keys except `seed`; empty if `seed` is not swept."""
    swept = _swept_keys(jobs)
    if "seed" not in swept:
        return []
    groups: dict[tuple[str | None, ...], list[JobResult]] = {}
    others = [key for key in swept if key != "seed"]
    for job in jobs:
        if job.run.status == "done":
            groups.setdefault(tuple(job.overrides.get(key) for key in others), []).append(job)
    return [Seeds(dict(zip(others, key, strict=True)), group) for key, group in groups.items() if len(group) > 1]


def _table(jobs: Sequence[JobResult]) -> tuple[list[str], list[list[object]]]:
    others = [key for key in _swept_keys(jobs) if key not in ("pipeline.K", "pipeline.M")]
    numbers = list(dict.fromkeys(name for job in jobs for name in job.run.evaluation))
    columns = ["job", *others, "K", "M", "loss", "examples/s", "bubble", "predicted", "wall s", *numbers, "status"]
    rows: list[list[object]] = []
    for job in jobs:
        run = job.run
        rows.append(
            [
                *(job.number, *(job.overrides.get(key) for key in others), run.K, run.M),
                *(run.loss, run.examples_per_second, percent(run.bubble), percent(run.bubble_predicted)),
                *(run.wall_seconds, *(run.evaluation.get(name) for name in numbers), run.outcome),
            ]
        )
    rows += [_seeds_row(seeds, others, numbers) for seeds in over_seeds(jobs)]
    return columns, rows


def _seeds_row(seeds: Seeds, others: Sequence[str], numbers: Sequence[str]) -> list[object]:
    """Returns a row with mean ± standard deviation of the loss and of the evaluation's numbers."""
    first, count = seeds.jobs[0].run, f"{len(seeds.jobs)} seeds"
    swept = [count if key == "seed" else seeds.overrides[key] for key in others]
    figures = [seeds.loss, None, None, None, None, *(seeds.evaluation.get(name) for name in numbers)]
    return ["mean ± sd", *swept, first.K, first.M, *figures, None]


def _seeds_as_json(seeds: Seeds) -> dict[str, Any]:
    return {
        "overrides": seeds.overrides,
        "jobs": [job.number for job in seeds.jobs],
        "loss": None if seeds.loss is None else asdict(seeds.loss),
        "evaluation": {name: asdict(spread) for name, spread in seeds.evaluation.items()},
    }


def _as_json(job: JobResult) -> dict[str, Any]:
    names = ("K", "M", "status", "error", *FIGURES, "evaluation")
    of_run = {name: getattr(job.run, name) for name in names}
    return {"job": job.number, "run_dir": str(job.run.folder), "overrides": job.overrides, **of_run}
