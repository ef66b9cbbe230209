"""Runs a sweep: Hydra composes its jobs and runs each, and one table of all ends it."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from gpipe_cli.disk import write_whole, writing
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import torchrun
from gpipe_cli.jobs.configuration import composed_with_hydra, for_hydra, in_one_line, resolved
from gpipe_cli.jobs.job import EntryPoint, run_job
from gpipe_cli.jobs.page import PAGE
from gpipe_cli.jobs.run_directory import require_writable, where_it_is
from gpipe_cli.launch.stop import stop_noted
from gpipe_cli.terminal.command import FAILED, Words, show
from gpipe_cli.terminal.document import Document
from gpipe_cli.terminal.runs import compare, find_runs
from gpipe_cli.typed_section import typed


@dataclass(frozen=True)
class Sweep:
    """Describes a sweep.

    Attributes:
        jobs: their number; None if the sweeper decides on the way.
        words: overrides for Hydra: the directory, and the keys that are left out of the names of the jobs' folders.
    """

    directory: Path
    jobs: int | None
    words: list[str]


def run_sweep(line: Words, program: EntryPoint, places: Sequence[str]) -> int:
    """Runs all jobs, and ends with their table; returns the exit code.

    Raises:
        ConfigurationError: the configuration of the sweep, or of its first job, is wrong.
    """
    sweep = open_sweep(line, program, places)
    codes: list[int] = []

    def task(composed: DictConfig) -> float:
        codes.append(FAILED)
        with signals.suspended():
            codes[-1], loss = run_job(composed, program, time.monotonic(), jobs=sweep.jobs)
        return loss

    try:
        with stop_noted() as signals:
            ask_hydra(line, program, [*places, *sweep.words], task)
    finally:
        code = end_sweep(sweep)
    return code or (FAILED if any(codes) else 0)  # a refused job leaves an earlier run's record as it was


def open_sweep(line: Words, program: EntryPoint, places: Sequence[str]) -> Sweep:
    """Makes the sweep's directory, counts its jobs, and names their folders by the keys that are swept.

    Raises:
        ConfigurationError: a word is wrong, or nothing can be written there.
    """
    try:
        words = OverridesParser.create().parse_overrides(for_hydra(line.overrides))
    except HydraException as error:
        raise ConfigurationError(in_one_line(error)) from error
    swept = [word for word in words if word.is_sweep_override()]
    others = [str(word.input_line) for word in words if word not in swept]
    name = line.value("--config-name", "-cn") or program.config_name
    config = composed_with_hydra(name, [*others, *places], line.folder)
    directory = Path(resolved(config, "hydra.sweep.dir"))
    require_writable("hydra.sweep.dir", directory)
    with writing(multirun := directory / "multirun.yaml"):
        multirun.unlink(missing_ok=True)  # Hydra would write through a link
    counted = all(word.is_choice_sweep() or word.is_range_sweep() for word in swept)
    jobs = math.prod(len(list(word.sweep_iterator())) for word in swept) if counted else None
    fixed = [word.key_or_group for word in words if word not in swept and not word.is_hydra_override()]
    excluded = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"
    return Sweep(directory.absolute(), jobs, [f"hydra.sweep.dir={typed(str(directory))}", excluded])


def ask_hydra(line: Words, program: EntryPoint, more: Sequence[str], task: Callable[[DictConfig], Any]) -> None:
    """Lets Hydra run ``task`` for each job, or answer the options of its own (--cfg, --info, …).

    Raises:
        ConfigurationError: Hydra refuses a word or a file.
    """
    began = False

    def run(composed: DictConfig) -> Any:
        nonlocal began
        began = True
        return task(composed)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises exceptions instead of printing them and exiting
    before = sys.argv
    sys.argv = [before[0], *line.options, *for_hydra(line.overrides), *more]
    try:
        hydra.main(version_base="1.3", config_path="pkg://gpipe_cli.conf", config_name=program.config_name)(run)()
    except Exception as error:
        if began or (isinstance(error, OSError) and error.errno):
            raise  # a fault of the program, or what Hydra prints for --cfg cannot be written
        raise ConfigurationError(in_one_line(error)) from error
    finally:
        sys.argv = before


def end_sweep(sweep: Sweep) -> int:
    """Prints the table of all jobs and writes it as sweep.json; returns the exit code."""
    if not torchrun.is_first():
        return 0
    runs = find_runs([sweep.directory])[0]
    table = compare(runs)
    document = table.document(sweep.directory)
    content = {"sweep": str(sweep.directory), "swept": table.differing, "jobs": table.facts}
    write_whole(sweep.directory / "sweep.json", json.dumps(content, indent=1) + "\n")
    missing = (sweep.jobs or 0) - len(runs)
    more = f"\n{missing} more were not started" if missing > 0 else ""
    with suppress(OSError):
        document.save(sweep.directory / PAGE)
    with suppress(OSError):  # nobody reads it
        tables = Document("", [document.blocks[0], *table.matrix()]).text()
        show(f"\n{tables}{more}\n\n{where_it_is(sweep.directory)}")
    return 0 if runs and missing <= 0 and all(run.status == "done" for run in runs) else FAILED
