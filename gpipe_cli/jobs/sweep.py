"""Runs a sweep: Hydra composes its jobs and runs each, and one table of all ends it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # its stubs are a package of their own

from gpipe_cli.disk import write_whole
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import torchrun
from gpipe_cli.jobs.configuration import composed_with_hydra, for_hydra, in_one_line, resolved
from gpipe_cli.jobs.job import EntryPoint, run_job
from gpipe_cli.jobs.page import PAGE
from gpipe_cli.jobs.run_directory import require_writable, where_it_is
from gpipe_cli.launch.stop import stop_noted
from gpipe_cli.terminal.command import FAILED, Words, show
from gpipe_cli.terminal.runs import compare, find_runs
from gpipe_cli.typed_section import typed


def run_sweep(line: Words, program: EntryPoint, places: Sequence[str]) -> int:
    """Runs all jobs of a sweep, then prints and saves their table; returns the exit code.

    Raises:
        ConfigurationError: the configuration of the sweep, or of its first job, is wrong.
    """
    directory, more = open_sweep(line, program, places)
    codes: list[int] = []

    def task(composed: DictConfig) -> float:
        codes.append(FAILED)
        with signals.suspended():
            codes[-1], loss = run_job(composed, program, time.monotonic())
        return loss

    try:
        with stop_noted() as signals:
            ask_hydra(line, program, [*places, *more], task)
    finally:
        code = end_sweep(directory)
    return code or (FAILED if any(codes) else 0)  # a refused job leaves an earlier run's record as it was


def open_sweep(line: Words, program: EntryPoint, places: Sequence[str]) -> tuple[Path, list[str]]:
    """Makes the sweep's directory; returns it, and overrides by which the jobs' folders are named by the swept keys.

    Raises:
        ConfigurationError: a word is wrong, or nothing can be written there.
    """
    try:
        words = OverridesParser.create().parse_overrides(for_hydra(line.overrides))
    except HydraException as error:
        raise ConfigurationError(in_one_line(error)) from error
    fixed = [word for word in words if not word.is_sweep_override()]
    typed_words = [str(word.input_line) for word in fixed]
    config = composed_with_hydra(program.config_name, [*typed_words, *places], line.folder)
    directory = Path(resolved(config, "hydra.sweep.dir"))
    require_writable("hydra.sweep.dir", directory)
    keys = ",".join(word.key_or_group for word in fixed if not word.is_hydra_override())
    excluded = f"hydra.job.config.override_dirname.exclude_keys=[{keys}]"
    return directory.absolute(), [f"hydra.sweep.dir={typed(str(directory))}", excluded]


def ask_hydra(line: Words, program: EntryPoint, more: Sequence[str], task: Callable[[DictConfig], Any]) -> None:
    """Lets Hydra run ``task`` for each job, or answer the options of its own (--cfg, --info, …).

    Raises:
        ConfigurationError: Hydra refuses a word or a file.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises exceptions instead of printing them and exiting
    before = sys.argv
    sys.argv = [before[0], *line.options, *for_hydra(line.overrides), *more]
    try:
        hydra.main(version_base="1.3", config_path="pkg://gpipe_cli.conf", config_name=program.config_name)(task)()
    except (HydraException, OmegaConfBaseException, YAMLError, RecursionError) as error:
        raise ConfigurationError(in_one_line(error)) from error
    finally:
        sys.argv = before


def end_sweep(directory: Path) -> int:
    """Prints the table of all jobs and writes it as sweep.json; returns the exit code."""
    if not torchrun.is_first():
        return 0
    runs = find_runs([directory])[0]
    table = compare(runs)
    document = table.document(directory)
    content = {"sweep": str(directory), "swept": table.differing, "jobs": table.facts}
    write_whole(directory / "sweep.json", json.dumps(content, indent=1) + "\n")
    with suppress(OSError):
        document.save(directory / PAGE)
    with suppress(OSError):  # the terminal is closed
        show(f"\n{document.text()}\n\n{where_it_is(directory)}")
    return 0 if runs and all(run.status == "done" for run in runs) else FAILED
