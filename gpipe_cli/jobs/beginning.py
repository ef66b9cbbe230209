"""Finds what a run begins from: a checkpoint, or weights made elsewhere, and again after a death. Imports no torch."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from gpipe_cli.checkpoint import files as checkpoints
from gpipe_cli.checkpoint.compatibility import refuse_unknown, require_compatible, vocabulary_sizes, with_vocabulary
from gpipe_cli.checkpoint.files import CheckpointError, CheckpointInfo, refuse_another_run
from gpipe_cli.checkpoint.foreign import weight_files
from gpipe_cli.config import Settings
from gpipe_cli.disk import write_whole
from gpipe_cli.jobs import torchrun
from gpipe_cli.jobs.configuration import Prepared
from gpipe_cli.json_files import read_rows
from gpipe_cli.launch.join import restart_count
from gpipe_cli.launch.report import WorkerFailed
from gpipe_cli.typed_section import flat

if TYPE_CHECKING:
    from gpipe_cli.terminal.console import Console

RESTARTS = "restarts.jsonl"  # one line for each restart

log = logging.getLogger(__name__)


def with_checkpoint(prepared: Prepared, run_dir: Path, console: Console) -> dict[str, Any]:
    """Finds what the run begins from; returns the configuration with its path in section `checkpoint`.

    Only a new run reads `checkpoint.init_from`. A resumed one has its own weights.

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
    resumed = resumed or _resumed(prepared, run_dir, console)
    refuse_another_run(run_dir, resumed)
    refuse_unknown(section.allow_changes, config, resumed)
    paths: dict[str, Any] = {"resume": None, "init_from": None, "init_except": []}
    if resumed is not None:
        config, paths["resume"] = _as_begun(config, resumed), str(resumed.path.absolute())
        with resumed.named():
            Settings.from_config(config)  # what it says in place of `auto` may be no value
        if resumed.state.vocabularies and checkpoints.matches_any("data", section.allow_changes):
            config = {**config, "data": with_vocabulary(config["data"], resumed)}
    elif section.init_from is not None:
        begun = _begun_with(Path(section.init_from).expanduser(), prepared, console)
        paths = {"resume": None, "init_from": str(begun.absolute())}
    elif section.init_except:
        console.warn("checkpoint.init_except has no effect: checkpoint.init_from is null, so all layers begin anew")
    return {**config, "checkpoint": {**config["checkpoint"], **paths}}


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Puts a key before the message of a CheckpointError inside the context."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error


def _as_begun(config: dict[str, Any], checkpoint: CheckpointInfo) -> dict[str, Any]:
    """Returns the configuration with what the planner chose when the run began, for keys that change results."""
    pipeline, begun = config["pipeline"], flat(checkpoint.state.configuration)
    keys = [key for key in ("M", "replicas", "schedule") if pipeline[key] == "auto"]
    taken = {key: begun.get(f"pipeline.{key}", "auto") for key in keys}
    if isinstance(replicas := taken.get("replicas"), int):
        # `workers` is here all that fit the devices, for one replica.
        taken["workers"] = max(1, pipeline["workers"] // max(1, replicas))
    return {**config, "pipeline": {**pipeline, **taken}}


def _begun_with(path: Path, prepared: Prepared, console: Console) -> Path:
    """Returns the path of the checkpoint, or of weights made elsewhere, that `checkpoint.init_from` names.

    Raises:
        CheckpointError: there is none, or its vocabulary has another size.
    """
    with naming("checkpoint.init_from"):
        if weight_files(path):  # a folder that is not complete is refused before workers start
            return path
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


def _resumed(prepared: Prepared, run_dir: Path, console: Console) -> CheckpointInfo | None:
    """Returns the checkpoint that `checkpoint.resume` stands for; None: the run begins anew.

    Raises:
        CheckpointError: there is none, or it was made with another configuration.
    """
    config, checkpoint = prepared.config, prepared.settings.checkpoint
    if checkpoint.resume is None:
        return None
    place = HydraConfig.get()
    typed_place = any(word.startswith("hydra.run.dir=") for word in place.overrides.hydra)
    own_place = typed_place or place.mode == RunMode.MULTIRUN  # `auto` then looks nowhere else
    with naming("checkpoint.resume"):
        found, warnings = checkpoints.resolve(checkpoint.resume, run_dir, None if own_place else run_dir.parent)
    console.warn(*warnings)
    if found is not None:
        require_compatible(found, _as_begun(config, found), checkpoint.allow_changes)
    return found


# -- again after a death -----------------------------------------------------------------------------------------------


class Restarts:
    """Decides whether a run starts again after a failure, and from which checkpoint.

    A killed worker or a lost connection is worth a restart every time. After any other failure one restart is tried:
    if the same failure comes again before a new checkpoint is saved, it ends the run. What the run has found out itself
    (a wrong configuration, a loss that is not finite) ends it at once.

    Args:
        config: plain values, with the checkpoint to resume from.

    Attributes:
        settings: the configuration of the next start, plain values.
        records: one for each restart of the run so far; they go into summary.json.
        begun: True once the run's directory holds no checkpoints but those of this run.
    """

    def __init__(self, config: dict[str, Any], run_dir: Path, console: Console) -> None:
        self._allowed, self._first, self.settings = config["launch"]["restarts"], config, config
        self._count, self._last = 0, ("", -1)  # restarts of this command; cause and step of the last failure
        self._run_dir, self._console = run_dir, console
        goes_on = config["checkpoint"]["resume"] is not None or restart_count()
        self.begun = False
        self.records = read_rows(run_dir / RESTARTS)[0] if goes_on else []
        if restart_count() and torchrun.is_first():  # torchrun has started this process again
            self._report("a rank ended", "", f"torchrun's restart {restart_count()}", self._newest_checkpoint()[1])

    def prepare_next(self, failed: WorkerFailed) -> None:
        """Chooses the settings of the next start, and reports the restart.

        Raises:
            WorkerFailed: ``failed`` itself, if no restart is left or none would help.
        """
        self._count += 1
        failure = failed.failure
        if failure is None or failure.is_plain or self._count > self._allowed:
            raise failed
        checkpoint, step = self._newest_checkpoint()
        before, self._last = self._last, (failure.cause, step)
        if not failure.from_outside and before == self._last:
            self._console.warn("no restart: this failure came twice, and no checkpoint was saved in between")
            raise failed
        log.info("%s", failure.text)
        self._report(failure.cause, failure.place, f"restart {self._count} of {self._allowed}", step)
        self.settings = {**self._first, "checkpoint": checkpoint}

    def _newest_checkpoint(self) -> tuple[dict[str, Any], int]:
        """Returns the section `checkpoint` with which the run starts again, and the step from which it continues."""
        section: dict[str, Any] = self._first["checkpoint"]
        newest = checkpoints.latest(self._run_dir)[0] if self.begun else None
        if newest is not None:
            weights: dict[str, Any] = {"resume": str(newest.path.absolute()), "init_from": None, "init_except": []}
            return {**section, **weights}, newest.step
        return section, 0 if section["resume"] is None else checkpoints.read_manifest(Path(section["resume"])).step

    def _report(self, cause: str, place: str, count: str, step: int) -> None:
        """Prints one restart and records it, also in a file that a resumed run reads.

        Args:
            count: number of the restart, in words.
            step: the step from which the run continues.
        """
        self._console.warn(f"{cause}: {count} from step {step}")
        self.records.append({"time": time.time(), "cause": cause, "place": place or None, "from_step": step})
        with suppress(OSError):
            write_whole(self._run_dir / RESTARTS, "".join(f"{json.dumps(record)}\n" for record in self.records))
