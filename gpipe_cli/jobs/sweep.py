"""Defines what Hydra calls before the first job, and ends a sweep with the table of its jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import torchrun
from gpipe_cli.jobs.configuration import Prepared, prepare
from gpipe_cli.jobs.page import PAGE
from gpipe_cli.jobs.run_directory import require_writable, where_it_is
from gpipe_cli.terminal.command import FAILED, REFUSED, show
from gpipe_cli.terminal.run_table import compare
from gpipe_cli.terminal.runs import find_runs

REFUSALS = (ConfigurationError, OmegaConfBaseException)


@dataclass
class Sweep:
    """Describes the sweep that this process runs; `jobs` is None if the sweeper decides on the way."""

    directory: Path
    jobs: int | None


# Set by Hydra's callback, read by the command, which runs in the same process.
current: Sweep | None = None
prepared: Prepared | None = None  # of a single run


class CommandCallback(Callback):
    """Refuses a wrong single run before Hydra makes its directory; of a sweep, sets `current`.

    Hydra turns every exception into a warning but SystemExit, whose cause the command prints.
    """

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Checks the configuration and the run directory."""
        global prepared  # Hydra makes this object and lends no other place
        HydraConfig.instance().set_config(config)
        try:
            composed = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            prepared = prepare(composed, trains=True)
            require_writable("hydra.run.dir", config.hydra.run.dir)
        except REFUSALS as error:
            raise SystemExit(REFUSED) from error

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Makes the sweep's directory, counts its jobs, and names their folders by the keys that are swept."""
        global current
        try:
            require_writable("hydra.sweep.dir", config.hydra.sweep.dir)
        except REFUSALS as error:
            raise SystemExit(REFUSED) from error
        words = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        swept = [word for word in words if word.is_sweep_override()]
        counted = all(word.is_choice_sweep() or word.is_range_sweep() for word in swept)
        jobs = prod(len(list(word.sweep_iterator())) for word in swept) if counted else None
        current = Sweep(Path(config.hydra.sweep.dir).absolute(), jobs)
        if fixed := [word.key_or_group for word in words if word not in swept]:
            # Hydra composes each job from the sweep's overrides of `hydra`.
            excluded = f"hydra.job.config.override_dirname.exclude_keys={fixed}"
            with read_write(config.hydra):
                config.hydra.overrides.hydra = [excluded, *config.hydra.overrides.hydra]


def end(sweep: Sweep) -> int:
    """Prints the table of all jobs and writes it as sweep.json; returns the exit code."""
    if not torchrun.is_first():
        return 0
    if not sweep.directory.is_dir():
        return REFUSED
    runs = find_runs([sweep.directory])[0]
    table = compare(runs)
    document = table.document(sweep.directory)
    content = {"sweep": str(sweep.directory), "swept": table.differing, "jobs": table.facts}
    (sweep.directory / "sweep.json").write_text(json.dumps(content, indent=1) + "\n")
    missing = (sweep.jobs or 0) - len(runs)
    more = f"\n{missing} more were not started" if missing > 0 else ""
    with suppress(OSError):
        document.save(sweep.directory / PAGE)
    with suppress(OSError):  # nobody reads it
        show(f"\n{document.blocks[0].text()}{more}\n\n{where_it_is(sweep.directory)}")
    return 0 if runs and missing <= 0 and all(run.status == "done" for run in runs) else FAILED


def job_line(number: int, words: Sequence[str]) -> str:
    """Returns the line above a job's output."""
    total = f"/{current.jobs}" if current is not None and current.jobs else ""
    return f"\njob {number + 1}{total}  {' '.join(word.lstrip('+') for word in words)}"
