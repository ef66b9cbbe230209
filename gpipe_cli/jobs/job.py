"""Runs one job: opens its directory, chooses its checkpoint, starts the workers, and reports how the job ended."""

from __future__ import annotations

import logging
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra._internal.callbacks import Callbacks
from hydra.core import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.checkpoint.files import step_directories, step_of
from gpipe_cli.jobs import torchrun
from gpipe_cli.jobs.beginning import RESTARTS, Restarts, with_checkpoint
from gpipe_cli.jobs.configuration import Prepared, composed_with_hydra, prepare, resolved, without_hydra
from gpipe_cli.jobs.page import PLAN, words_of, write_page
from gpipe_cli.jobs.run_directory import RunRecord, require_writable, sole_writer, where_it_is
from gpipe_cli.launch.join import join, joined
from gpipe_cli.launch.report import WorkerFailed
from gpipe_cli.launch.supervisor import Job, OnEvent, launch, launch_inline
from gpipe_cli.terminal.command import Words, code_and_reason
from gpipe_cli.terminal.text import command_name, relative_paths
from gpipe_cli.typed_section import typed

if TYPE_CHECKING:
    from gpipe_cli.terminal.console import Console


GROUPS = ("experiment", "debug", "model", "data", "task", "optimizer", "lr_schedule", "precision", "pipeline")


@dataclass(frozen=True)
class EntryPoint:
    """Describes the function that workers run, and its configuration.

    Attributes:
        entry: "package.module:function", called as `function(context, {"settings": …, …})` with the resolved
            configuration; `run_job` adds "started_at", when the job began, by `time.monotonic`.
        preload: modules that are imported once for all workers; None: torch and the entry's own.
        conclude: shows the workers' result and returns the exit code.
        config_name: the YAML file of conf/ that holds the command's configuration.
    """

    entry: str = "gpipe_cli.trainer.run:main"
    preload: tuple[str, ...] | None = None
    conclude: Callable[[Any, Path, Console], int] | None = None
    config_name: str = "train"


def run_once(line: Words, program: EntryPoint, started_at: float, places: Sequence[str]) -> int:
    """Runs the job of a command line; its directory is made when nothing in the line can be refused any more.

    Args:
        started_at: time of the command's start, by `time.monotonic`.
        places: overrides of Hydra's directories.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: it has one line for each mistake.
    """
    config = composed_with_hydra(program.config_name, [*line.overrides, *places], line.folder)
    config.hydra.mode = RunMode.RUN
    HydraConfig.instance().set_config(config)
    prepared = prepare(without_hydra(config), trains=True)
    require_writable("hydra.run.dir", resolved(config, "hydra.run.dir"))

    def run(composed: DictConfig) -> int:
        return run_job(composed, program, started_at, prepared)[0]

    # Hydra makes the directory, opens train.log, and calls what a user has put into hydra.callbacks.
    context = HydraContext(cast(Any, None), callbacks := Callbacks(config))  # only a sweep loads further configurations
    callbacks.on_run_start(config=config, config_name=program.config_name)
    ended = hydra_utils.run_job(run, config, "hydra.run.dir", None, context)
    callbacks.on_run_end(config=config, config_name=program.config_name, job_return=ended)
    code: int = ended.return_value
    return code


def run_job(
    composed: DictConfig,
    program: EntryPoint,
    started_at: float,
    prepared: Prepared | None = None,
) -> tuple[int, float]:
    """Runs one job to its end, in the directory that Hydra has made.

    Args:
        composed: the configuration, without Hydra's own node.
        program: what the workers run, and what is done with its result.
        started_at: time of the start by `time.monotonic`; each job of a sweep has its own.
        prepared: the same configuration, checked. None for a job of a sweep: it is checked here, so that the sweep's
            table records a refusal.

    Returns:
        The exit code, and the final loss for Hydra's sweepers (NaN when the job failed).

    Raises:
        KeyboardInterrupt, SystemExit: the run was asked to stop, which also ends a sweep.
    """
    from gpipe_cli.terminal.console import Console  # imported late: rich is slow, and a refusal needs none of it

    hydra = HydraConfig.get()  # Hydra's own node: the directory, and whether this is a job of a sweep
    run_dir, is_sweep = Path(hydra.runtime.output_dir), hydra.mode == RunMode.MULTIRUN
    if OmegaConf.select(composed, "verify.format") == "json":
        sys.stdout = sys.stderr  # standard output gets the report and nothing else
    logging.raiseExceptions = False  # a train.log that cannot be written prints no tracebacks between the lines
    record = RunRecord(run_dir, composed, keep=is_sweep)
    every = 1 if prepared is None else prepared.settings.logging.every  # a sweep's jobs print no such lines
    mode = OmegaConf.select(composed, "logging.console")
    with Console(every, mode, silent=not torchrun.is_first(), brief=is_sweep) as console:
        if is_sweep:
            words = " ".join(word.lstrip("+") for word in hydra.overrides.task)
            console.say(f"\njob {hydra.job.num}  {words}")
        try:
            with sole_writer(run_dir), record:
                prepared = prepared or prepare(composed)
                result = _run_workers(prepared, program, started_at, record, console)
                record.begin()
                if program.conclude is not None:
                    return program.conclude(result, run_dir, console), math.nan
            if torchrun.is_first():
                write_page(run_dir, console.warn)
                if not is_sweep:
                    console.say(where_it_is(run_dir))
        except Exception as error:
            if (refusal := code_and_reason(command_name(), error)) is None:
                raise
            console.error(refusal[1], logged=record.is_open or isinstance(error, WorkerFailed))
            if record.is_open and isinstance(error, WorkerFailed) and torchrun.is_first():
                write_page(run_dir, console.warn)
            return refusal[0], math.nan
        loss = result.get("loss") if isinstance(result, dict) else None
        return 0, math.nan if loss is None else float(loss)


def _run_workers(
    prepared: Prepared, program: EntryPoint, started_at: float, record: RunRecord, console: Console
) -> Any:
    """Runs the workers, again after a failure if that can help; returns the entry point's result on rank 0."""
    run_dir = record.run_dir
    settings = with_checkpoint(prepared, run_dir, console)
    choices = HydraConfig.get().runtime.choices  # a model brings along others than the defaults
    options = " ".join(f"{group}={choices[group]}" for group in GROUPS if choices.get(group))
    for line in (options, prepared.line):
        console.detail(line)
    restarts = Restarts(settings, run_dir, console)

    def handle(event: dict[str, Any]) -> None:
        """Handles an event of a worker. Before "begun" it may refuse the run, so no file of an earlier run changes."""
        kind = event.get("kind")
        if kind == "begun":
            record.begin()
            restarts.begun = True
            for earlier in (PLAN, *((RESTARTS,) if not restarts.records else ())):
                (run_dir / earlier).unlink(missing_ok=True)
        elif kind == "drawn":
            write_page(run_dir, console.warn, running=True)
        elif kind == "chosen":
            record.choose(event["keys"])
            console.say(f"chosen: {words_of(event['keys'])}")
        else:
            console(event)

    try:
        while True:
            config = {"settings": restarts.settings, "started_at": started_at, "restarts": restarts.records}
            try:
                if joined():
                    return join(partial(torchrun.enter, program.entry), config, run_dir, handle)
                return launch_program(program, config, run_dir, handle)
            except WorkerFailed as failed:
                restarts.prepare_next(failed)  # or raises it
    except (KeyboardInterrupt, SystemExit):
        console.say(f"{_how_to_go_on(run_dir, program)}\n{where_it_is(run_dir)}")
        raise


def _how_to_go_on(run_dir: Path, program: EntryPoint) -> str:
    """Returns a sentence: which step of a stopped run is saved, and what to type to continue from it."""
    saved = step_directories(run_dir)
    if program.conclude is not None or not saved:
        return "stopped before its end; no step is saved"
    place = HydraConfig.get()
    is_sweep = place.mode == RunMode.MULTIRUN
    key, folder = ("hydra.sweep.dir", place.sweep.dir) if is_sweep else ("hydra.run.dir", place.runtime.output_dir)
    words = shlex.join([f"{key}={typed(relative_paths(folder))}", "checkpoint.resume=auto"])
    return f"stopped before its end; step {step_of(saved[-1])} is saved. To go on, type the same with {words}"


def launch_program(program: EntryPoint, config: dict[str, Any], run_dir: Path, on_event: OnEvent) -> Any:
    """Runs an entry point in workers of this command, or with `launch.inline` inside it.

    Args:
        config: "settings", the resolved configuration with the number of workers, and the entry point's other values.
        run_dir: exists; the workers' logs go there.

    Returns:
        The entry point's result on rank 0.

    Raises:
        WorkerFailed: a worker raised or died. With `launch.inline`, exceptions arrive unchanged.
        ConfigurationError: a worker refused the configuration.
    """
    pipeline, how = config["settings"]["pipeline"], config["settings"]["launch"]
    replicas = 1 if pipeline["replicas"] == "auto" else pipeline["replicas"]  # auto: rank 0 divides the workers
    job = Job(
        run_dir=run_dir,
        workers=pipeline["workers"] * replicas,
        entry=program.entry,
        config=config,
        preload=("torch", program.entry.partition(":")[0]) if program.preload is None else program.preload,
        threads=pipeline["threads"],
        grace_seconds=how["grace_seconds"],
    )
    return launch_inline(job, on_event) if how["inline"] else launch(job, on_event)
