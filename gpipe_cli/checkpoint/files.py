"""Defines the layout of checkpoints on disk, and reads and checks manifests. This file imports no torch.

    RUN/checkpoints/
        step_00000100/                      complete: it gets this name only once everything below is on disk
            manifest.json                   step, run state, configuration, versions, and every file's size and checksum
            layers/<layer name>.safetensors weights, buffers and optimizer state of one layer (layer_state.py)
        step_00000200.partial/              being written; what a killed run has left is removed at the next start
            part_<worker>.json              the files that one worker has written
        step_00000050.discarded/            about to be deleted
        best.json                           the step with the best evaluation so far, and its metric

Files are keyed by layer name and nothing on disk depends on K: a worker of any partition opens the files of its own
layers. `commit.py` writes this layout, `choose.py` finds checkpoints in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from .. import __version__
from ..errors import ConfigurationError
from ..layers import Owner
from .old_names import with_todays_names

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

FORMAT = 3  # 2 has other names in its configuration, and no digests of vocabularies
STEP_NAME = re.compile(r"step_(\d{8,})")
PARTIAL = ".partial"
DISCARDED = ".discarded"


class CheckpointError(ConfigurationError):
    """Raised when a checkpoint cannot be written, found or used; the message names the file and what to do."""


class DamagedFile(CheckpointError):
    """Raised for a file of a checkpoint that is not what the manifest says."""


class NewerFormat(ConfigurationError):
    """Raised for a checkpoint that a later release of gpipe-cli has written; it is not damaged, and is not touched."""


@dataclass(frozen=True)
class LayerFile:
    """Describes one layer's file, as the manifest has it.

    Attributes:
        bytes: size of the file.
        sha256: checksum of the whole file, in hexadecimal.
        parameters: names inside the layer, such as ``attention.query.weight``.
        tied: those of them that the file of another layer, their owner's, holds.
    """

    bytes: int
    sha256: str
    parameters: tuple[str, ...]
    tied: Mapping[str, Owner] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LayerFile:
        """Returns the file that `as_json` has described."""
        tied = {name: Owner(*owner) for name, owner in content.get("tied", {}).items()}
        return cls(content["bytes"], content["sha256"], tuple(content["parameters"]), tied)

    def as_json(self) -> dict[str, Any]:
        """Returns plain values, with the key "tied" only where there are ties."""
        tied = {"tied": dict(self.tied)} if self.tied else {}
        return {"bytes": self.bytes, "sha256": self.sha256, "parameters": list(self.parameters), **tied}


@dataclass(frozen=True)
class RunState:
    """Holds what a run needs beside its layers in order to continue; every value must be JSON.

    Attributes:
        data_position: the ``Batch.position`` to continue after (docs/design.md, "Data").
        schedule: state of the learning rate schedule.
        scalars: values of the whole run: best loss so far, skipped updates, ….
        configuration: the resolved configuration.
        data_fingerprint: of the training data; None where their source has none.
        vocabularies: the SHA-256 of each file in the run's folder of vocabularies.
    """

    data_position: Json = None
    schedule: Json = None
    scalars: Mapping[str, Json] = field(default_factory=dict)
    configuration: Mapping[str, Json] = field(default_factory=dict)
    data_fingerprint: str | None = None
    vocabularies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointInfo:
    """Describes a complete checkpoint, as its manifest does. ``layers`` is in model order.

    Attributes:
        versions: of what has written it; under "device" the kind of device that computed, where it is known.
    """

    path: Path
    step: int
    state: RunState
    layers: Mapping[str, LayerFile]
    versions: Mapping[str, str]

    def layer_path(self, layer: str) -> Path:
        return layer_path(self.path, layer)

    @property
    def run_dir(self) -> Path:
        return self.path.parent.parent


def checkpoints_directory(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def vocabulary_folder(run_dir: Path) -> Path:
    """Returns the folder in which a run keeps the vocabularies of its texts."""
    return run_dir / "vocabulary"


def step_directory(run_dir: Path, step: int) -> Path:
    return checkpoints_directory(run_dir) / f"step_{step:08d}"


def partial_directory(run_dir: Path, step: int) -> Path:
    return with_suffix(step_directory(run_dir, step), PARTIAL)


def layer_path(directory: Path, layer: str) -> Path:
    """Returns the file of one layer; characters that a file name cannot hold, such as ``/``, are percent-encoded."""
    return directory / "layers" / f"{quote(layer, safe='')}.safetensors"


def with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step_"))


def step_directories(run_dir: Path) -> list[Path]:
    """Returns the directories of complete checkpoints, oldest first."""
    home = checkpoints_directory(run_dir)
    if not home.is_dir():
        return []
    return sorted((path for path in home.iterdir() if STEP_NAME.fullmatch(path.name)), key=step_of)


def locked(descriptor: int, kind: int) -> bool:
    """Locks an open file or directory until its descriptor is closed; returns False if another process keeps it locked.

    Args:
        kind: `fcntl.LOCK_SH` or `LOCK_EX`, which wait for the other process, or one of them with `fcntl.LOCK_NB`.
    """
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def sha256_of(path: Path) -> str:
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum.update(block)
    return checksum.hexdigest()


def read_manifest(directory: Path) -> CheckpointInfo:
    """Reads one complete checkpoint's manifest.

    Raises:
        NewerFormat: a later release has written it.
        CheckpointError: it is missing or damaged, or of another step than its directory.
    """
    path = directory / "manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if int(content["format"]) > FORMAT:
            raise NewerFormat(_newer(path, content))
        layers = {entry["name"]: LayerFile.from_json(entry) for entry in content["layers"]}
        state = RunState(**content["state"])
        if content["format"] == 2:
            state = replace(state, configuration=with_todays_names(state.configuration))
        info = CheckpointInfo(directory, int(content["step"]), state, layers, content["versions"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except NewerFormat:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if STEP_NAME.fullmatch(directory.name) and step_of(directory) != info.step:
        raise CheckpointError(f"{path} is damaged: it says step {info.step}, its directory step {step_of(directory)}")
    return info


def _newer(path: Path, content: Mapping[str, Any]) -> str:
    versions = content.get("versions")
    release = versions.get("gpipe-cli") if isinstance(versions, Mapping) else None
    return (
        f"{path} has format {content['format']}, and gpipe-cli {__version__} reads up to {FORMAT}: install gpipe-cli "
        f"{release or '(a later release)'} or newer. Nothing of the checkpoint was touched"
    )


def problems(info: CheckpointInfo) -> list[str]:
    """Returns one sentence for each file that is missing or has another size; a worker compares what it loads."""
    found = []
    for layer, file in info.layers.items():
        path = info.layer_path(layer)
        try:
            size = path.stat().st_size
        except OSError as error:
            found.append(f"{path} is missing" if isinstance(error, FileNotFoundError) else f"{path}: {error}")
            continue
        if size != file.bytes:
            found.append(f"{path} has {size} bytes instead of {file.bytes}")
    return found


def problems_of(directory: Path) -> list[str]:
    """Returns what `problems` does for a directory, and one sentence for a missing or damaged manifest.

    Raises:
        NewerFormat: a later release has written the checkpoint.
    """
    try:
        return problems(read_manifest(directory))
    except CheckpointError as error:
        return [str(error)]


def require_whole(info: CheckpointInfo, layer: str) -> None:
    """Compares the checksum of one layer's file with the manifest.

    Raises:
        DamagedFile: it differs, or the file cannot be read.
    """
    path = info.layer_path(layer)
    try:
        if sha256_of(path) != info.layers[layer].sha256:
            raise DamagedFile(f"{path} is damaged: its SHA-256 is not the manifest's")
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error


def best_step(run_dir: Path) -> int | None:
    """Returns the step recorded as the best; None where there is none or its checkpoint is gone.

    Raises:
        CheckpointError: the record is damaged.
    """
    path = checkpoints_directory(run_dir) / "best.json"
    try:
        step = int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): delete it; the next best result writes it anew") from error
    return step if step_directory(run_dir, step).is_dir() else None


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether a pattern matches a dotted name, or something that it is part of."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def shorten(texts: Sequence[str], limit: int = 8) -> str:
    """Joins texts for a message; a long list ends in a count."""
    rest = len(texts) - limit
    return ", ".join(texts[:limit]) + (f" and {rest} more" if rest > 0 else "")
