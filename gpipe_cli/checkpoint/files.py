"""Defines the layout of checkpoints on disk, and finds, reads and checks them. This file imports no torch.

    RUN/checkpoints/
        step_00000100/                      complete: it gets this name only once everything below is on disk
            manifest.json                   step, run state, configuration, versions, and every file's size and checksum
            layers/<layer name>.safetensors weights, buffers and optimizer state of one layer (layer_state.py)
        step_00000200.partial/              being written; what a killed run has left is removed at the next start
            part_<worker>.json              the files that one worker has written
        step_00000050.discarded/            about to be deleted

The newest manifest says which step has the best evaluation (`Progress.best_step`), so no kill can part the two.
Files are keyed by layer name and nothing on disk depends on K: a worker of any partition opens the files of its own
layers. `writer.py` writes this layout.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import quote

from typing_extensions import TypedDict

from ..disk import open_regular
from ..errors import ConfigurationError
from ..json_files import DamagedJson, parse_json, read_json
from ..layers import Owner
from ..typed_section import shown
from ..version import __version__

Json: TypeAlias = Any  # a value of JSON

FORMAT = 3  # 2 has other names in its configuration, and no digests of vocabularies
RENAMED = {  # targets of format 2
    "gpipe_cli.data.translation.TranslationSource": "gpipe_cli.data.cldr.source.TranslationSource",
    "gpipe_cli.trainer.adafactor.Adafactor": "gpipe_cli.optim.adafactor.Adafactor",
    "gpipe_cli.trainer.lr_schedules.inverse_sqrt": "gpipe_cli.optim.lr_schedules.inverse_sqrt",
}
GONE = {  # keys that our own models, data and optimizers had in earlier releases
    "model": ("average", "dilate", "auxiliary_width", "channels_last"),
    "optimizer": ("decay_only",),
    "data": (
        *("broken_images_limit", "download", "on_defect", "strict", "bits"),
        *("vocabulary_pairs", "vocabulary_temperature", "vocabulary_samples"),
    ),
}
PARALLEL_TEXT = "gpipe_cli.data.parallel.source.ParallelTextSource"  # in format 2 `vocabulary` meant a shared one
STEP_NAME = re.compile(r"step_(\d{8,})")
PARTIAL = ".partial"
DISCARDED = ".discarded"


class CheckpointError(ConfigurationError):
    """Raised when a checkpoint cannot be written, found or used; the message names the file and what to do."""


class NewerFormat(ConfigurationError):
    """Raised for a checkpoint that a later release of gpipe-cli has written; it is not damaged, and is not touched."""


@dataclass(frozen=True)
class LayerFile:
    """Describes one layer's file, as the manifest has it.

    Attributes:
        name: the layer's name.
        bytes: size of the file in bytes.
        sha256: checksum of the whole file, in hexadecimal.
        parameters: names inside the layer, such as ``attention.query.weight``.
        tied: owners of the parameters that the file of another layer holds, by name.
    """

    name: str
    bytes: int
    sha256: str
    parameters: tuple[str, ...]
    tied: Mapping[str, Owner] = field(default_factory=dict)


@dataclass(frozen=True)
class RunState:
    """Holds the state of a run beside its layers that a resume needs; every value must be JSON.

    Attributes:
        data_position: the ``Batch.position`` to continue after (docs/design.md, "Data").
        schedule: state of the learning rate schedule.
        scalars: values of the whole run: best loss so far and its step, skipped updates, ….
        configuration: the resolved configuration.
        data_fingerprint: digest of the training data; None if their source has none.
        vocabularies: the SHA-256 of each file in the run's folder of vocabularies.
    """

    data_position: Json = None
    schedule: Json = None
    scalars: Mapping[str, bool | int | float | None] = field(default_factory=dict)
    configuration: Mapping[str, Json] = field(default_factory=dict)
    data_fingerprint: str | None = None
    vocabularies: Mapping[str, str] = field(default_factory=dict)


class Manifest(TypedDict):
    """Describes manifest.json."""

    format: int
    step: int
    state: RunState
    layers: list[LayerFile]
    versions: dict[str, str]


@dataclass(frozen=True)
class CheckpointInfo:
    """Describes a complete checkpoint, as its manifest does. ``layers`` is in model order.

    Attributes:
        versions: release of each package that has written it; "device": the kind of device, if known.
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

    @contextmanager
    def named(self, typed: Iterable[str] = ()) -> Iterator[None]:
        """Puts the manifest's path before a refusal of its configuration inside the context.

        Args:
            typed: keys from the command line; a refusal about one of these, or with the path already, stays.
        """
        try:
            yield
        except ConfigurationError as error:
            said = str(error)
            if str(self.path) in said or any(re.search(rf"\b{re.escape(key)}\b", said) for key in typed):
                raise
            raise ConfigurationError(f"{self.path}/manifest.json: {said}") from error


def checkpoints_directory(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def vocabulary_folder(run_dir: Path) -> Path:
    """Returns the folder in which a run keeps the vocabularies of its texts."""
    return run_dir / "vocabulary"


def step_directory(run_dir: Path, step: int) -> Path:
    return checkpoints_directory(run_dir) / f"step_{step:08d}"


def layer_path(directory: Path, layer: str) -> Path:
    """Returns the file of one layer; characters that a file name cannot hold, such as ``/``, are percent-encoded."""
    return directory / "layers" / f"{quote(layer, safe='')}.safetensors"


def step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step_"))


def step_directories(run_dir: Path) -> list[Path]:
    """Returns the directories of complete checkpoints, oldest first."""
    home = checkpoints_directory(run_dir)
    if not home.is_dir():
        return []
    return sorted((path for path in home.iterdir() if STEP_NAME.fullmatch(path.name)), key=step_of)


def sha256_of(path: Path) -> str:
    """Computes a file's SHA-256, in hexadecimal."""
    checksum = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        while block := file.read(1 << 22):
            checksum.update(block)
    return checksum.hexdigest()


def read_manifest(directory: Path) -> CheckpointInfo:
    """Reads one complete checkpoint's manifest.

    Raises:
        NewerFormat: a later release has written it.
        CheckpointError: it is missing or damaged.
    """
    path = directory / "manifest.json"
    try:
        content = read_json(path, dict[str, Any])
        if content.get("format", 0) > FORMAT:
            raise NewerFormat(
                f"{path} has format {content['format']}, and gpipe-cli {__version__} reads up to {FORMAT}: install "
                "a later gpipe-cli. Nothing of the checkpoint was touched"
            )
        manifest = read_json(path, Manifest)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except DamagedJson as error:
        raise CheckpointError(str(error)) from error
    state, layers = manifest["state"], {layer.name: layer for layer in manifest["layers"]}
    state = replace(state, configuration=with_todays_names(state.configuration))
    return CheckpointInfo(directory, manifest["step"], state, layers, manifest["versions"])


def with_todays_names(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Translates the configuration of an earlier release into today's sections, keys and ``_target_``s."""
    renamed = {"lr_schedule" if key == "schedule" else key: it for key, it in configuration.items() if key != "verify"}
    for name, section in renamed.items():
        target = str(section.get("_target_")) if isinstance(section, Mapping) else ""
        if target.startswith("gpipe_cli."):
            kept = {key: value for key, value in section.items() if key not in GONE.get(name, ())}
            if target == PARALLEL_TEXT and "vocabulary" in kept:
                kept["shared_vocabulary"] = kept.pop("vocabulary") is not None
            renamed[name] = {**kept, "_target_": RENAMED.get(target, target)}
    return renamed


def open_checkpoint(directory: Path) -> CheckpointInfo:
    """Reads the manifest of one checkpoint, whose files must be there at full size. Checksums are not read here.

    Raises:
        NewerFormat: a later release has written it.
        CheckpointError: it cannot be used.
    """
    info, found = read_manifest(directory), []
    for layer, file in info.layers.items():
        path = info.layer_path(layer)
        if not path.is_file():
            found.append(f"{path} is missing")
        elif (size := path.stat().st_size) != file.bytes:
            found.append(f"{path} has {size} bytes instead of {file.bytes}")
    if found:
        raise CheckpointError(f"{directory} cannot be used: {shorten(found)}")
    return info


def is_whole(directory: Path) -> bool:
    """Returns whether a checkpoint's files are all there at full size; raises NewerFormat for a later release's."""
    with suppress(CheckpointError):
        return bool(open_checkpoint(directory))
    return False


def require_whole(info: CheckpointInfo, layer: str) -> None:
    """Compares the checksum of one layer's file with the manifest.

    Raises:
        CheckpointError: it differs, or the file cannot be read; the message names an older checkpoint, if any.
    """
    path = info.layer_path(layer)
    try:
        is_whole = sha256_of(path) == info.layers[layer].sha256
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {advice(info.path)}") from error
    if not is_whole:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's. {advice(info.path)}")


def best_step(run_dir: Path) -> int | None:
    """Returns the step of the best evaluation, as the newest readable manifest says.

    None: no evaluation was the best, or its checkpoint is gone.

    Raises:
        NewerFormat: a later release has written that manifest.
    """
    directories = step_directories(run_dir)
    for directory in reversed(directories):
        with suppress(CheckpointError):
            step = read_manifest(directory).state.scalars.get("best_step")
            return int(step) if step is not None and step in [*map(step_of, directories)] else None
    return None


# --- finding one ------------------------------------------------------------------------------------------------------

Choice: TypeAlias = tuple[CheckpointInfo | None, list[str]]
"""The checkpoint to use, if there is one, and a warning for each newer one that is damaged."""


def latest(run_dir: Path) -> Choice:
    """Returns the newest whole checkpoint of a run, and warnings of damaged newer ones. None: the run saved none.

    Raises:
        NewerFormat: a later release has written the newest one that is not damaged.
        CheckpointError: the run has checkpoints, and every one of them is damaged.
    """
    warnings: list[str] = []
    for directory in reversed(step_directories(run_dir)):
        try:
            return open_checkpoint(directory), [f"{text}; using {directory.name}" for text in warnings]
        except CheckpointError as error:
            warnings.append(str(error))
    if warnings:
        raise CheckpointError(
            f"no checkpoint in {checkpoints_directory(run_dir)} can be used ({'; '.join(warnings)}): restore the files "
            "from a copy, or delete that directory to begin anew"
        )
    return None, []


def resolve(resume: str | Path, run_dir: Path, run_root: Path | None = None) -> Choice:
    """Chooses the checkpoint that ``checkpoint.resume`` stands for.

    Args:
        resume: ``auto``, a run directory, or one checkpoint in it.
        run_dir: this run's own directory; ``auto`` looks here first.
        run_root: the directory of all runs; ``auto`` then takes the run below it (one or two levels) that saved last.

    Returns:
        The checkpoint, and warnings. None stands only for ``auto`` before anything was saved: the run begins at step 0.

    Raises:
        CheckpointError: the path holds no checkpoint, or none that can be used.
    """
    if resume != "auto":
        return find(Path(resume).expanduser())
    choice = latest(run_dir)
    newest = None if run_root is None or choice[0] is not None else _newest_run(run_root)
    return choice if newest is None else latest(newest)


def find(path: Path, step: str = "last") -> tuple[CheckpointInfo, list[str]]:
    """Returns a checkpoint, and a warning for each damaged newer one.

    Args:
        path: a run directory, or one checkpoint.
        step: the checkpoint of a run directory: a number, "best" or "last".

    Raises:
        CheckpointError: there is none, or none that can be used.
    """
    if step == "best":
        if (chosen := best_step(path)) is None:
            raise CheckpointError(f"{path} has recorded no best checkpoint: use step=last, or a step it has kept")
        return open_checkpoint(step_directory(path, chosen)), []
    if step != "last":
        if not step.isdecimal():
            raise CheckpointError(f"step={step}: use a number, best or last")
        directory = step_directory(path, int(step))
        if not directory.is_dir():
            kept = ", ".join(str(step_of(kept)) for kept in step_directories(path))
            raise CheckpointError(f"{path} has no checkpoint of step {step}; it has kept: {kept or 'none'}")
        return open_checkpoint(directory), []
    if STEP_NAME.fullmatch(path.name) is not None or (path / "manifest.json").is_file():  # one checkpoint, not a run
        return open_checkpoint(path), []
    found, warnings = latest(path)
    if found is None:
        raise CheckpointError(
            f"{path} holds no complete checkpoint (looked for {checkpoints_directory(path)}/step_*): "
            "give the directory of a run that has saved one"
        )
    return found, warnings


def advice(damaged: Path) -> str:
    """Returns a sentence that names an older checkpoint of the same run to use in place of a damaged one."""
    before = [path for path in step_directories(damaged.absolute().parent.parent) if path.name < damaged.name]
    usable = next((path for path in reversed(before) if is_whole(path)), None)
    return "This run has no older checkpoint to use instead" if usable is None else f"Use {usable} instead"


def _newest_run(run_root: Path) -> Path | None:
    """Returns the run with the newest manifest, one or two levels below; None: there is none.

    Two levels, because runs are often grouped by date.
    """
    saved: list[tuple[int, Path]] = []
    for home in [*run_root.glob("*/checkpoints"), *run_root.glob("*/*/checkpoints")]:
        for directory in step_directories(home.parent):
            with suppress(OSError):  # no manifest, or just pruned by a run in progress
                saved.append(((directory / "manifest.json").stat().st_mtime_ns, home.parent))
    return max(saved)[1] if saved else None


def refuse_another_run(run_dir: Path, resumed: CheckpointInfo | None) -> None:
    """Refuses a run directory with the checkpoints of another run. It is called before any file is overwritten.

    Raises:
        NewerFormat: one of them, perhaps later than the resumed one, was written by a later release.
        CheckpointError: the directory holds checkpoints and the run does not continue from one of them.
    """
    home, existing = checkpoints_directory(run_dir), step_directories(run_dir)
    for directory in existing:
        is_whole(directory)  # raises NewerFormat; damaged ones may be there
    if existing and (resumed is None or resumed.path.resolve().parent != home.resolve()):
        raise CheckpointError(
            f"{home} already holds checkpoints, the newest of step {step_of(existing[-1])}, which this run would mix "
            f"with its own: type checkpoint.resume={run_dir} to continue it, or choose another hydra.run.dir"
        )


def require_writable_as_json(name: str, value: Json) -> None:
    """Refuses a value that JSON cannot hold, by writing and reading it, before a step is computed in vain.

    Raises:
        ConfigurationError: a checkpoint that holds it could not be read again.
    """
    try:
        parse_json(json.dumps(value), cast(Any, object))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name}={shown(value)}: no checkpoint can hold this value: {error}") from error


# --- words ------------------------------------------------------------------------------------------------------------


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether one of the patterns, as `model.*`, matches a dotted name or a section that contains it."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def shorten(texts: Sequence[str], limit: int = 8) -> str:
    """Joins texts for a message; a long list ends in a count."""
    rest = len(texts) - limit
    return ", ".join(texts[:limit]) + (f" and {rest} more" if rest > 0 else "")
