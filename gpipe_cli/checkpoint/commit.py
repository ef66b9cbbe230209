"""Completes and prunes checkpoints; the layout is in `files.py`. This file imports no torch.

A checkpoint is collected in a ``.partial`` directory, to which every worker adds the files of its own layers, and
becomes complete by one rename of that directory: a kill at any moment leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..disk import open_for_writing, writing
from .files import (
    DISCARDED,
    FORMAT,
    PARTIAL,
    CheckpointError,
    CheckpointInfo,
    LayerFile,
    RunState,
    best_step,
    checkpoints_directory,
    locked,
    partial_directory,
    problems,
    problems_of,
    read_manifest,
    shorten,
    step_directories,
    step_directory,
    step_of,
    with_suffix,
)


def write_json(path: Path, value: object) -> None:
    """Replaces ``path`` so that a kill leaves either the old content or the new."""
    temporary = with_suffix(path, ".tmp")
    with os.fdopen(open_for_writing(temporary), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flushes a directory's entries (new files, renames) to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_part(directory: Path, worker: int, layers: Mapping[str, LayerFile]) -> None:
    """Records the files that ``worker`` has written into the partial checkpoint ``directory``."""
    write_json(_part_path(directory, worker), {name: file.as_json() for name, file in layers.items()})


def complete(
    run_dir: Path, step: int, state: RunState, workers: int, model: Mapping[str, Collection[str]], device: str
) -> CheckpointInfo:
    """Makes the partial checkpoint of ``step``, which every worker has finished, a complete one.

    Args:
        workers: the number of workers that wrote a part.
        model: the parameter names of every layer of the whole model, in model order.
        device: the kind of device that computed.

    Raises:
        CheckpointError: a part or a file is missing, or the parts together are not the model; the checkpoint stays
            partial.
    """
    directory, final = partial_directory(run_dir, step), step_directory(run_dir, step)
    written = {layer: file for worker in range(workers) for layer, file in _read_part(directory, worker).items()}
    _require_whole_model(written, model, step)
    info = CheckpointInfo(directory, step, state, {name: written[name] for name in model}, _versions(device))
    if damaged := problems(info):
        raise CheckpointError(f"the checkpoint of step {step} is not complete: {shorten(damaged)}")
    for worker in range(workers):
        _part_path(directory, worker).unlink()
    write_json(directory / "manifest.json", _manifest(info))
    directory.rename(final)
    sync_directory(final.parent)
    return read_manifest(final)


def amend(run_dir: Path, step: int, state: RunState) -> None:
    """Replaces the progress in the complete checkpoint of ``step``; the rest belongs to its layers."""
    info = read_manifest(step_directory(run_dir, step))
    write_json(info.path / "manifest.json", _manifest(replace(info, state=replace(info.state, scalars=state.scalars))))


def record_best(run_dir: Path, step: int, metric: str, value: float) -> None:
    """Records the complete checkpoint of ``step`` as the best; pruning keeps it until another is recorded."""
    write_json(checkpoints_directory(run_dir) / "best.json", {"step": step, "metric": metric, "value": value})


def prune(run_dir: Path, keep: int) -> None:
    """Deletes all but the best and the ``keep`` newest undamaged checkpoints, and what was discarded before.

    One that another command reads (`choose.choose`), or that cannot be deleted, is left to the next call.
    """
    best, undamaged = best_step(run_dir), 0
    for directory in reversed(step_directories(run_dir)):
        if undamaged >= keep and step_of(directory) != best:
            with suppress(OSError):
                _discard_unless_read(directory)
        elif not problems_of(directory):
            undamaged += 1
    _delete(run_dir, DISCARDED)


def refuse_another_run(run_dir: Path, resumed: CheckpointInfo | None) -> None:
    """Refuses a run directory with the checkpoints of another run; called before any file in it is overwritten.

    Raises:
        NewerFormat: one of them, perhaps later than the resumed one, was written by a later release.
        CheckpointError: the directory holds checkpoints and the run does not continue from one of them.
    """
    home, existing = checkpoints_directory(run_dir), step_directories(run_dir)
    for directory in existing:
        problems_of(directory)  # raises NewerFormat; damaged ones may be there
    if existing and (resumed is None or resumed.path.resolve().parent != home.resolve()):
        raise CheckpointError(
            f"{home} already holds checkpoints, the newest of step {step_of(existing[-1])}, which this run would mix "
            f"with its own: type checkpoint.resume={run_dir} to continue it, or choose another hydra.run.dir"
        )


def prepare_directory(run_dir: Path, resumed: CheckpointInfo | None) -> None:
    """Prepares the run directory, once, before any worker saves.

    Partial checkpoints of a killed run are removed. Checkpoints later than the one resumed from (they were damaged, or
    the user went back on purpose) are discarded, and deleted when the first new checkpoint is complete: the directory
    always holds one training.

    Raises:
        CheckpointError: the directory holds checkpoints and the run does not continue from one of them.
        DiskError: it cannot be made.
    """
    refuse_another_run(run_dir, resumed)
    home, existing = checkpoints_directory(run_dir), step_directories(run_dir)
    with writing(home):
        home.mkdir(exist_ok=True)
    for folder in (home.parent, home.parent.parent):  # a checkpoint is safe only when its folder is
        sync_directory(folder)
    _delete(run_dir, PARTIAL)
    _delete(run_dir, DISCARDED)
    for directory in existing:
        if resumed is not None and step_of(directory) > resumed.step:
            _discard(directory)


def _discard_unless_read(directory: Path) -> None:
    """Discards a checkpoint, unless another command holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if locked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _discard(directory)
    finally:
        os.close(descriptor)


def _discard(directory: Path) -> None:
    """Discards a checkpoint by one rename, because its files cannot all be deleted at once if a kill comes."""
    target = with_suffix(directory, DISCARDED)
    if target.exists():
        shutil.rmtree(target)
    directory.rename(target)


def _delete(run_dir: Path, suffix: str) -> None:
    for directory in checkpoints_directory(run_dir).glob(f"step_*{suffix}"):
        shutil.rmtree(directory, ignore_errors=True)


def _read_part(directory: Path, worker: int) -> dict[str, LayerFile]:
    path = _part_path(directory, worker)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"worker {worker} has finished its part of {directory}, but {path.name} cannot be seen here: the run "
            "directory must be on a file system that all machines of the run share (hydra.run.dir=...)"
        ) from error
    return {name: LayerFile.from_json(file) for name, file in content.items()}


def _require_whole_model(written: Mapping[str, LayerFile], model: Mapping[str, Collection[str]], step: int) -> None:
    saved = {*written, *(f"{layer}.{name}" for layer, file in written.items() for name in file.parameters)}
    expected = {*model, *(f"{layer}.{name}" for layer, names in model.items() for name in names)}
    if saved != expected:
        raise CheckpointError(
            f"the checkpoint of step {step} is not the model and was not kept; not in both: "
            + shorten(sorted(saved ^ expected))
        )


def _manifest(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": info.step,
        "state": asdict(info.state),
        "versions": dict(info.versions),
        "layers": [
            {"name": name, "file": info.layer_path(name).relative_to(info.path).as_posix(), **file.as_json()}
            for name, file in info.layers.items()
        ],
    }


def _versions(device: str) -> dict[str, str]:
    found = {"gpipe-cli": __version__, "python": platform.python_version(), "device": device}
    for package in ("torch", "safetensors", "babel", "sentencepiece"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # put on the path by hand: works, but carries no version
            found[package] = "unknown"
    return found


def _part_path(directory: Path, worker: int) -> Path:
    return directory / f"part_{worker}.json"
