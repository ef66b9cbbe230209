"""Finds the checkpoint, or the weights made elsewhere, that a run begins from. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from gpipe_cli.checkpoint import files as checkpoints
from gpipe_cli.checkpoint.compatibility import refuse_unknown, require_compatible, vocabulary_sizes, with_vocabulary
from gpipe_cli.checkpoint.files import CheckpointError, CheckpointInfo, refuse_another_run
from gpipe_cli.checkpoint.foreign import is_foreign, weight_files
from gpipe_cli.config import Settings
from gpipe_cli.jobs import torchrun
from gpipe_cli.jobs.configuration import Prepared
from gpipe_cli.launch.join import restart_count
from gpipe_cli.typed_section import flat

if TYPE_CHECKING:
    from gpipe_cli.terminal.console import Console


def with_checkpoint(prepared: Prepared, run_dir: Path, console: Console) -> dict[str, Any]:
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
    resumed = resumed or _resumed(prepared, run_dir, console)
    refuse_another_run(run_dir, resumed)
    refuse_unknown(section.allow_changes, config, resumed)
    paths: dict[str, Any] = {"resume": None, "init_from": None, "init_except": []}
    if resumed is not None:
        config, paths["resume"] = _as_begun(config, resumed), str(resumed.path.absolute())
        with resumed.named():
            Settings.from_config(config)  # what it says in place of `auto` may be no value
        if resumed.state.vocabularies and checkpoints.is_named("data", section.allow_changes):
            config = {**config, "data": with_vocabulary(config["data"], resumed)}
    elif section.init_from is not None:
        begun = _begun_with(Path(section.init_from).expanduser(), prepared, console)
        paths = {"resume": None, "init_from": str(begun.absolute())}
    elif section.init_except:
        console.warn("checkpoint.init_except has no effect: checkpoint.init_from is null, so all layers begin anew")
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
    if isinstance(replicas := taken.get("replicas"), int):  # of as many workers as devices
        taken["workers"] = max(1, pipeline["workers"] // max(1, replicas))
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


def _resumed(prepared: Prepared, run_dir: Path, console: Console) -> CheckpointInfo | None:
    """Returns the checkpoint that `checkpoint.resume` stands for, if any."""
    config, checkpoint = prepared.config, prepared.settings.checkpoint
    if checkpoint.resume is None:
        return None
    place = HydraConfig.get()
    typed_place = any(word.startswith("hydra.run.dir=") for word in place.overrides.hydra)
    own_place = typed_place or place.mode == RunMode.MULTIRUN
    with naming("checkpoint.resume"):
        found, warnings = checkpoints.resolve(checkpoint.resume, run_dir, None if own_place else run_dir.parent)
    console.warn(*warnings)
    if found is not None:
        require_compatible(found, _as_begun(config, found), checkpoint.allow_changes)
    return found
