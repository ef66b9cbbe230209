"""Runs one job: opens its directory, chooses its checkpoint, starts the workers, and reports how the job ended.

Hydra calls it, once or for each job of a sweep, which ends with the table of its jobs.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.checkpoint import files as checkpoints
from gpipe_cli.checkpoint.compatibility import (
    refuse_unknown,
    require_compatible,
    vocabulary_sizes,
    with_vocabulary,
)
from gpipe_cli.checkpoint.files import CheckpointError, CheckpointInfo, refuse_another_run, step_directories, step_of
from gpipe_cli.checkpoint.foreign import is_foreign, weight_files
from gpipe_cli.config import Settings
from gpipe_cli.disk import DiskError, write_whole, writing
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import torchrun, trust
from gpipe_cli.jobs.configuration import Prepared, prepare
from gpipe_cli.jobs.page import PAGE, PLAN, write_page
from gpipe_cli.jobs.run_directory import RESTARTS, Restarts, RunRecord, require_writable, sole_writer, where_it_is
from gpipe_cli.launch.join import join, joined, restart_count
from gpipe_cli.launch.report import WorkerFailed
from gpipe_cli.launch.supervisor import Job, OnEvent, launch, launch_inline
from gpipe_cli.terminal.command import FAILED, REFUSED, code_and_reason, show
from gpipe_cli.terminal.runs import compare, find_runs
from gpipe_cli.terminal.text import command_name, relative_paths
from gpipe_cli.typed_section import flat, typed

if TYPE_CHECKING:
    from gpipe_cli.terminal.console import Console


REFUSALS = (ConfigurationError, OmegaConfBaseException)


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


def run_job(composed: DictConfig, program: EntryPoint, started_at: float) -> tuple[int, float]:
    """Runs one job to its end.

    Args:
        composed: without Hydra's own node.
        started_at: when the command was started, by `time.monotonic`; each job of a sweep has its own start.

    Returns:
        The exit code, and the final loss for Hydra's sweepers (NaN when the job failed).

    Raises:
        KeyboardInterrupt, SystemExit: the run was asked to stop, which also ends a sweep.
    """
    from gpipe_cli.terminal.console import Console  # imported late: rich is slow, and a refusal needs none of it

    place = HydraConfig.get()
    run_dir = Path(place.runtime.output_dir)
    is_sweep = place.mode == RunMode.MULTIRUN
    if OmegaConf.select(composed, "verify.format") == "json":
        sys.stdout = sys.stderr  # standard output gets the report and nothing else
    logging.raiseExceptions = False  # a train.log that cannot be written prints no tracebacks between the lines
    record = RunRecord(run_dir, composed, keep=is_sweep)
    with Console(*_console_settings(composed), silent=not torchrun.is_first(), brief=is_sweep) as console:
        if is_sweep:
            total = f"/{sweep.jobs}" if sweep is not None and sweep.jobs else ""
            words = " ".join(word.lstrip("+") for word in place.overrides.task)
            console.say(f"\njob {int(place.job.num) + 1}{total}  {words}")
        try:
            with sole_writer(run_dir), record:
                prepared = prepare(composed)
                config = _with_checkpoint(prepared, run_dir, place, console)
                config = {"settings": config, "started_at": time.monotonic() if is_sweep else started_at}
                result = _start(prepared, config, run_dir, program, console, record)
                record.begin()
                if program.conclude is not None:
                    return program.conclude(result, run_dir, console), math.nan
            if torchrun.is_first():
                write_page(run_dir, console.warn)
                if not is_sweep:
                    console.say(where_it_is(run_dir))
        except Exception as error:
            if (told := code_and_reason(command_name(), error)) is None:
                raise
            console.error(told[1], logged=record.is_open or isinstance(error, WorkerFailed))
            if record.is_open and isinstance(error, WorkerFailed) and torchrun.is_first():
                write_page(run_dir, console.warn)
            return told[0], math.nan
        loss = result.get("loss") if isinstance(result, dict) else None
        return 0, math.nan if loss is None else float(loss)


def _with_checkpoint(prepared: Prepared, run_dir: Path, place: Any, console: Console) -> dict[str, Any]:
    """Returns the configuration with the path of the checkpoint to resume from or to begin with.

    `checkpoint.init_from` is read by a new run only: a resumed one has its own weights.

    Raises:
        ConfigurationError: no checkpoint could hold the configuration.
        CheckpointError: there is no checkpoint, it was made with another configuration, or the directory holds others.
    """
    config, section = prepared.config, prepared.settings.checkpoint
    if not torchrun.is_first():
        return config
    for key, value in flat(config).items():
        checkpoints.require_writable_as_json(key, value)
    resumed = checkpoints.latest(run_dir)[0] if restart_count() else None
    resumed = resumed or _resumed(prepared, run_dir, place, console)
    refuse_another_run(run_dir, resumed)
    refuse_unknown(section.allow_changes, config, resumed)
    paths: dict[str, Any] = {"resume": None, "init_from": None, "init_except": []}
    if resumed is not None:
        config, paths["resume"] = _as_begun(config, resumed), str(resumed.path.absolute())
        if resumed.state.vocabularies and checkpoints.is_named("data", section.allow_changes):
            config = {**config, "data": with_vocabulary(config["data"], resumed)}
    elif section.init_from is not None:
        begun = _begun_with(Path(section.init_from).expanduser(), prepared, console)
        paths = {"resume": None, "init_from": str(begun.absolute())}
    return {**config, "checkpoint": {**config["checkpoint"], **paths}}


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Names the key whose value a refusal of a checkpoint is about."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error


def _as_begun(config: dict[str, Any], checkpoint: CheckpointInfo) -> dict[str, Any]:
    """Returns the configuration with those keys that the planner chose when the run began and that change results."""
    pipeline, begun = config["pipeline"], flat(checkpoint.state.configuration)
    keys = [key for key in ("M", "replicas", "schedule") if pipeline[key] == "auto"]
    taken = {key: begun.get(f"pipeline.{key}", "auto") for key in keys}
    with checkpoint.named():
        replicas = Settings.from_config({**config, "pipeline": {**pipeline, **taken}}).pipeline.replicas
    if "replicas" in taken:  # of as many workers as devices
        taken["workers"] = max(1, pipeline["workers"] // replicas)
    return {**config, "pipeline": {**pipeline, **taken}}


def _begun_with(path: Path, prepared: Prepared, console: Console) -> Path:
    """Returns the checkpoint, or the weights made elsewhere, that `checkpoint.init_from` stands for.

    Raises:
        CheckpointError: there is none, or its tables are of another vocabulary's size.
    """
    if is_foreign(path):
        with naming("checkpoint.init_from"):
            weight_files(path)  # refuses a folder that is not complete, before workers start
        return path
    with naming("checkpoint.init_from"):
        info, warnings = checkpoints.find(path)
    console.warn(*warnings)
    sizes = vocabulary_sizes(info, {"model": prepared.config["model"]})
    if sizes and not prepared.settings.checkpoint.init_except:
        others = ", ".join(f"{key}={old} there, {now} here" for key, (old, now) in sizes.items())
        raise CheckpointError(
            f"checkpoint.init_from={path} has another vocabulary ({others}): use its sizes and data.tokenizer="
            f"{info.run_dir}, or begin its tables anew: checkpoint.init_except=['*embedding',softmax]"
        )
    return info.path


def _resumed(prepared: Prepared, run_dir: Path, place: Any, console: Console) -> CheckpointInfo | None:
    """Returns the checkpoint that `checkpoint.resume` stands for, if any."""
    config, checkpoint = prepared.config, prepared.settings.checkpoint
    if checkpoint.resume is None:
        return None
    typed_place = any(word.startswith("hydra.run.dir=") for word in place.overrides.hydra)
    own_place = typed_place or place.mode == RunMode.MULTIRUN
    with naming("checkpoint.resume"):
        found, warnings = checkpoints.resolve(checkpoint.resume, run_dir, None if own_place else run_dir.parent)
    console.warn(*warnings)
    if found is not None:
        require_compatible(found, _as_begun(config, found), checkpoint.allow_changes)
    return found


def _start(
    prepared: Prepared, config: dict[str, Any], run_dir: Path, program: EntryPoint, console: Console, record: RunRecord
) -> Any:
    for line in prepared.lines:
        console.detail(line)
    restarts = Restarts(config["settings"], run_dir, console)

    def on_event(event: dict[str, Any]) -> None:
        if event.get("kind") == "begun":
            record.begin()
            trust.remember_paths(prepared.config["data"])
            for earlier in (PLAN, *((RESTARTS,) if not restarts.records else ())):
                (run_dir / earlier).unlink(missing_ok=True)
        elif event.get("kind") == "drawn":
            write_page(run_dir, console.warn, running=True)
        elif event.get("kind") == "chosen":
            record.choose(event["keys"])
            console.say("chosen: " + " ".join(f"{key}={typed(value)}" for key, value in event["keys"].items()))
        else:
            console(event)

    def start(settings: dict[str, Any]) -> Any:
        started = {**config, "settings": settings, "restarts": restarts.records}
        if joined():
            return join(torchrun.ENTRY, torchrun.wrap(program.entry, started), run_dir, on_event)
        return launch_program(program, started, run_dir, on_event)

    try:
        return restarts.run(start)
    except (KeyboardInterrupt, SystemExit):
        console.say(f"{_how_to_go_on(run_dir, program)}\n{where_it_is(run_dir)}")
        raise


def _how_to_go_on(run_dir: Path, program: EntryPoint) -> str:
    """Returns which step of a stopped run is saved, and how the run continues from there."""
    saved = step_directories(run_dir)
    if program.conclude is not None or not saved:
        return "stopped before its end; no step is saved"
    key, folder = torchrun.own_place()
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
    settings = Settings.from_config(config["settings"])
    job = Job(
        run_dir=run_dir,
        workers=settings.pipeline.worker_count * settings.pipeline.replicas,
        entry=program.entry,
        config=config,
        preload=("torch", program.entry.partition(":")[0]) if program.preload is None else program.preload,
        threads=settings.pipeline.threads,
        grace_seconds=settings.launch.grace_seconds,
    )
    return launch_inline(job, on_event) if settings.launch.inline else launch(job, on_event)


def _console_settings(composed: DictConfig) -> tuple[int, Any]:
    """Reads `logging` from a configuration that is not checked yet: its errors must be printed too."""
    every, mode = OmegaConf.select(composed, "logging.every"), OmegaConf.select(composed, "logging.console")
    return (every if isinstance(every, int) and every > 0 else 1), ("plain" if mode == "plain" else "auto")


# -- before the first job, and after the last one of a sweep -----------------------------------------------------------


@dataclass
class Sweep:
    """Describes the sweep that this process runs; `jobs` is None if the sweeper decides on the way."""

    directory: Path
    jobs: int | None


sweep: Sweep | None = None  # that this process runs: set by Hydra's callback, read by the command


class CommandCallback(Callback):
    """Refuses a wrong single run before Hydra makes its directory; of a sweep, sets `sweep`.

    Hydra turns every exception into a warning but SystemExit, whose cause the command prints.
    """

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Checks the configuration and the run directory."""
        HydraConfig.instance().set_config(config)
        try:
            composed = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            prepare(composed, trains=True)
            require_writable("hydra.run.dir", config.hydra.run.dir)
        except REFUSALS as error:
            raise SystemExit(REFUSED) from error

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Makes the sweep's directory, counts its jobs, and names their folders by the keys that are swept."""
        global sweep  # Hydra makes this object and lends no other place
        try:
            require_writable("hydra.sweep.dir", config.hydra.sweep.dir)
            with writing(multirun := Path(config.hydra.sweep.dir) / "multirun.yaml"):
                multirun.unlink(missing_ok=True)  # Hydra would write through a link
        except (*REFUSALS, DiskError) as error:
            raise SystemExit(REFUSED) from error
        words = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        swept = [word for word in words if word.is_sweep_override()]
        counted = all(word.is_choice_sweep() or word.is_range_sweep() for word in swept)
        jobs = math.prod(len(list(word.sweep_iterator())) for word in swept) if counted else None
        sweep = Sweep(Path(config.hydra.sweep.dir).absolute(), jobs)
        if fixed := [word.key_or_group for word in words if word not in swept]:
            # Hydra composes each job from the sweep's overrides of `hydra`.
            excluded = f"hydra.job.config.override_dirname.exclude_keys={fixed}"
            of_hydra = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)  # each job resolves its ${…}
            with read_write(config.hydra):
                config.hydra.overrides.hydra = [excluded, *cast(list[str], of_hydra)]


def end_sweep(sweep: Sweep) -> int:
    """Prints the table of all jobs and writes it as sweep.json; returns the exit code."""
    if not torchrun.is_first():
        return 0
    if not sweep.directory.is_dir():
        return REFUSED
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
        show(f"\n{document.blocks[0].text()}{more}\n\n{where_it_is(sweep.directory)}")
    return 0 if runs and missing <= 0 and all(run.status == "done" for run in runs) else FAILED
