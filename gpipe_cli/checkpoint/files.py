"""Checkpoints on disk: layout, manifest, checking, choosing one to go on from. No torch: the command process uses it.

    RUN/checkpoints/
        step_00000100/                      complete: it gets this name only once everything below is on disk
            manifest.json                   step, run state, configuration, versions, and every file's size and checksum
            layers/<layer name>.safetensors weights, buffers and optimizer state of one layer (see checkpoint.py)
        step_00000200.partial/              being written; a leftover of a killed run, removed at the next start
            part_<worker>.json              what one worker has written
        best.json                           which step was the best so far, and by which metric

Files are keyed by layer name and nothing on disk depends on K: a worker of any partition opens the files of its own
layers. ``checkpoint_commit.py`` writes this layout.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

from ..errors import ConfigurationError
from .old_names import with_todays_names

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

FORMAT = 2  # 2 may have data_fingerprint in its run state
_STEP_NAME = re.compile(r"step_(\d{8,})")
PARTIAL = ".partial"
DISCARDED = ".discarded"  # no longer counts, but may not be deleted yet


class CheckpointError(ConfigurationError):
    """A checkpoint cannot be written, found or used; the message names the file and what to do."""


@dataclass(frozen=True)
class LayerFile:
    """What the manifest promises about one layer's file.

    Attributes:
        bytes: size of the file.
        sha256: checksum of the whole file, in hexadecimal.
        parameters: names inside the layer, e.g. ``attention.query.weight``.
    """

    bytes: int
    sha256: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class RunState:
    """What a run needs beside its layers in order to go on; every value must be JSON.

    Attributes:
        data_position: the ``Batch.position`` to continue after (docs/design.md, "Data").
        schedule: state of the learning-rate schedule.
        scalars: model-wide values (best metric so far, skipped updates, ...).
        configuration: the resolved configuration.
        data_fingerprint: of the training data, None where their source gives none.
    """

    data_position: Json = None
    schedule: Json = None
    scalars: Mapping[str, Json] = field(default_factory=dict)
    configuration: Mapping[str, Json] = field(default_factory=dict)
    data_fingerprint: str | None = None


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint, as its manifest describes it. ``layers`` is in model order."""

    path: Path
    step: int
    state: RunState
    layers: Mapping[str, LayerFile]
    versions: Mapping[str, str]

    def layer_path(self, layer: str) -> Path:
        return layer_path(self.path, layer)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to use (None: there is none), and a sentence for each newer one that had to be passed over."""

    checkpoint: CheckpointInfo | None
    warnings: tuple[str, ...] = ()


def checkpoints_directory(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def vocabulary_folder(run_dir: Path) -> Path:
    """Where a run keeps what its texts are written in."""
    return run_dir / "vocabulary"


def step_directory(run_dir: Path, step: int) -> Path:
    return checkpoints_directory(run_dir) / f"step_{step:08d}"


def partial_directory(run_dir: Path, step: int) -> Path:
    return with_suffix(step_directory(run_dir, step), PARTIAL)


def layer_path(directory: Path, layer: str) -> Path:
    """File of one layer; characters that a file name cannot hold, such as ``/``, are percent-encoded."""
    return directory / "layers" / f"{quote(layer, safe='')}.safetensors"


def sha256_of(path: Path) -> str:
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum.update(block)
    return checksum.hexdigest()


def read_manifest(directory: Path) -> CheckpointInfo:
    """Read one complete checkpoint's manifest.

    Raises:
        CheckpointError: it is missing, not readable, or of a newer format.
    """
    path = directory / "manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']}, this gpipe-cli reads up to {FORMAT}: "
                f"install gpipe-cli {content['versions']['gpipe-cli']} or newer"
            )
        layers = {
            entry["name"]: LayerFile(entry["bytes"], entry["sha256"], tuple(entry["parameters"]))
            for entry in content["layers"]
        }
        state = RunState(**content["state"])
        state = replace(state, configuration=with_todays_names(state.configuration))
        return CheckpointInfo(directory, content["step"], state, layers, content["versions"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def problems(info: CheckpointInfo) -> list[str]:
    """One sentence for each file that is missing or has another size than the manifest says; reads no content."""
    found = []
    for layer, expected in info.layers.items():
        path = info.layer_path(layer)
        try:
            size = path.stat().st_size
        except OSError as error:
            found.append(f"{path} is missing" if isinstance(error, FileNotFoundError) else f"{path}: {error}")
            continue
        if size != expected.bytes:
            found.append(f"{path} has {size} bytes instead of {expected.bytes}")
    return found


def verify_checksum(info: CheckpointInfo, layer: str) -> None:
    """Read one layer's file and compare it with the manifest.

    Raises:
        CheckpointError: it differs; the message names the file and an older checkpoint of the same run, if any.
    """
    path = info.layer_path(layer)
    try:
        intact = sha256_of(path) == info.layers[layer].sha256
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not intact:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's. {_advice(info.path)}")


def latest(run_dir: Path) -> Choice:
    """The newest checkpoint of a run whose files are all there at full size; None when the run has saved none.

    Raises:
        CheckpointError: the run has checkpoints, and every one of them is damaged.
    """
    warnings: list[str] = []
    for directory in reversed(step_directories(run_dir)):
        found = problems_of(directory)
        if not found:
            return Choice(read_manifest(directory), tuple(f"{text}; using {directory.name}" for text in warnings))
        warnings.append(f"{directory.name} cannot be used: {shorten(found)}")
    if warnings:
        raise CheckpointError(
            f"no checkpoint in {checkpoints_directory(run_dir)} can be used ({'; '.join(warnings)}): restore the files "
            "from a copy, or delete that directory to begin anew"
        )
    return Choice(None)


def best(run_dir: Path) -> CheckpointInfo | None:
    """The checkpoint last recorded as the best, None when there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    step = best_step(run_dir)
    return None if step is None else open_checkpoint(step_directory(run_dir, step))


def resolve(resume: str | Path, run_dir: Path, run_root: Path | None = None) -> Choice:
    """Find what ``checkpoint.resume`` means.

    Args:
        resume: ``auto``, a run directory, its ``checkpoints`` directory, or one checkpoint in it.
        run_dir: this run's own directory; ``auto`` looks here first.
        run_root: where runs live; ``auto`` then takes the run below it (one or two levels) that saved last.

    Returns:
        A choice without a checkpoint only for ``auto`` when nothing was saved yet: the run begins at step 0.

    Raises:
        CheckpointError: the path holds no checkpoint, or none that can be used.
    """
    if resume != "auto":
        return Choice(*find(Path(resume).expanduser()))
    choice = latest(run_dir)
    newest = None if run_root is None or choice.checkpoint is not None else _newest_run(run_root)
    return choice if newest is None else latest(newest)


def find(path: Path) -> tuple[CheckpointInfo, tuple[str, ...]]:
    """The checkpoint at ``path``, or the newest one in the run at ``path``, and warnings about damaged newer ones.

    Raises:
        CheckpointError: there is none, or none that can be used.
    """
    if _STEP_NAME.fullmatch(path.name) or (path / "manifest.json").is_file():
        return open_checkpoint(path), ()
    run_dir = path.parent if path.name == "checkpoints" else path
    choice = latest(run_dir)
    if choice.checkpoint is None:
        raise CheckpointError(
            f"{path} holds no complete checkpoint (looked for {checkpoints_directory(run_dir)}/step_*): "
            "give the directory of a run that has saved one"
        )
    return choice.checkpoint, choice.warnings


def choose(path: Path, step: str = "last") -> tuple[CheckpointInfo, tuple[str, ...]]:
    """The checkpoint that a command was told to use, and warnings about damaged newer ones.

    Args:
        path: a run directory, its folder of checkpoints, or one checkpoint.
        step: of a run directory: a number, "best" or "last".

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if step == "last":
        return find(path)
    run_dir = path.parent if path.name == "checkpoints" else path
    if step == "best":
        if (chosen := best(run_dir)) is None:
            raise CheckpointError(f"{run_dir} has recorded no best checkpoint: use step=last, or a step it has kept")
        return chosen, ()
    if not step.isdigit():
        raise CheckpointError(f"step={step}: use a number, best or last")
    directory = step_directory(run_dir, int(step))
    if not directory.is_dir():
        kept = ", ".join(str(step_of(kept)) for kept in step_directories(run_dir))
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step}; it has kept: {kept or 'none'}")
    return open_checkpoint(directory), ()


def open_checkpoint(directory: Path) -> CheckpointInfo:
    """Read the manifest of one checkpoint and check that its files are there at full size.

    Raises:
        CheckpointError: it cannot be used; the message names an older one of the same run, if any.
    """
    try:
        info = read_manifest(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_advice(directory)}") from error
    if found := problems(info):
        raise CheckpointError(f"{directory} cannot be used: {shorten(found)}. {_advice(directory)}")
    return info


def _advice(damaged: Path) -> str:
    older = [path for path in step_directories(damaged.resolve().parent.parent) if path.name < damaged.name]
    usable = next((path for path in reversed(older) if not problems_of(path)), None)
    return "This run has no older checkpoint to use instead" if usable is None else f"Use {usable} instead"


def _newest_run(run_root: Path) -> Path | None:
    """By the time its newest manifest was written; two levels, because runs are often grouped by date."""
    saved: list[tuple[int, Path]] = []
    for home in [*run_root.glob("*/checkpoints"), *run_root.glob("*/*/checkpoints")]:
        for directory in step_directories(home.parent):
            with suppress(OSError):  # no manifest, or just pruned by a run in progress
                saved.append(((directory / "manifest.json").stat().st_mtime_ns, home.parent))
    return max(saved)[1] if saved else None


def problems_of(directory: Path) -> list[str]:
    """As ``problems``, a missing or damaged manifest included."""
    try:
        return problems(read_manifest(directory))
    except CheckpointError as error:
        return [str(error)]


def with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step_"))


def step_directories(run_dir: Path) -> list[Path]:
    """Directories of complete checkpoints, oldest first."""
    home = checkpoints_directory(run_dir)
    if not home.is_dir():
        return []
    return sorted((path for path in home.iterdir() if _STEP_NAME.fullmatch(path.name)), key=step_of)


def best_step(run_dir: Path) -> int | None:
    """None too when the named checkpoint is gone: it was set aside with the course of training it belonged to."""
    path = checkpoints_directory(run_dir) / "best.json"
    try:
        step = int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): delete it; the next best result writes it anew") from error
    return step if step_directory(run_dir, step).is_dir() else None


def shorten(texts: Sequence[str], limit: int = 8) -> str:
    """Texts in a row for a message; a long row ends in a count."""
    rest = len(texts) - limit
    return ", ".join(texts[:limit]) + (f" and {rest} more" if rest > 0 else "")
