"""Finds and opens checkpoints: the newest, the best, one of a step, the one to resume. This file imports no torch."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .files import (
    STEP_NAME,
    CheckpointError,
    CheckpointInfo,
    best_step,
    checkpoints_directory,
    locked,
    problems,
    problems_of,
    read_manifest,
    shorten,
    step_directories,
    step_directory,
    step_of,
)

held: list[int] = []  # descriptors of the checkpoints that this process reads; `commit.prune` leaves these


@dataclass(frozen=True)
class Choice:
    """Holds the checkpoint to use (None: there is none), and a warning for each newer one that is damaged."""

    checkpoint: CheckpointInfo | None
    warnings: tuple[str, ...] = ()


def latest(run_dir: Path) -> Choice:
    """Chooses the newest checkpoint of a run whose files are there at full size; None when the run saved none.

    Raises:
        NewerFormat: a later release has written the newest one that is not damaged.
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


def resolve(resume: str | Path, run_dir: Path, run_root: Path | None = None) -> Choice:
    """Chooses the checkpoint that ``checkpoint.resume`` stands for.

    Args:
        resume: ``auto``, a run directory, its ``checkpoints`` directory, or one checkpoint in it.
        run_dir: this run's own directory; ``auto`` looks here first.
        run_root: the directory of all runs; ``auto`` then takes the run below it (one or two levels) that saved last.

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
    """Returns the checkpoint at ``path``, or the newest of the run there, and a warning for each damaged newer one.

    Raises:
        CheckpointError: there is none, or none that can be used.
    """
    if is_one(path):
        return open_checkpoint(path), ()
    run_dir = _run_dir(path)
    choice = latest(run_dir)
    if choice.checkpoint is None:
        raise CheckpointError(
            f"{path} holds no complete checkpoint (looked for {checkpoints_directory(run_dir)}/step_*): "
            "give the directory of a run that has saved one"
        )
    return choice.checkpoint, choice.warnings


def choose(path: Path, step: str = "last") -> tuple[CheckpointInfo, tuple[str, ...]]:
    """Returns the checkpoint that a command is to use, and a warning for each damaged newer one.

    Until this process ends, no run in progress on this machine deletes it.

    Args:
        path: a run directory, its folder of checkpoints, or one checkpoint.
        step: of a run directory: a number, "best" or "last".

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    while True:
        there = step_directories(_run_dir(path))
        try:
            info, warnings = _choose(path, step)
            descriptor = os.open(info.path, os.O_RDONLY)
        except (CheckpointError, OSError):
            if step_directories(_run_dir(path)) == there:
                raise
            continue  # a run has just replaced it by a newer one
        locked(descriptor, fcntl.LOCK_SH)
        if info.path.is_dir():
            held.append(descriptor)
            return info, warnings
        os.close(descriptor)


def _choose(path: Path, step: str) -> tuple[CheckpointInfo, tuple[str, ...]]:
    if step == "last":
        return find(path)
    run_dir = _run_dir(path)
    if step == "best":
        if (chosen := best_step(run_dir)) is None:
            raise CheckpointError(f"{run_dir} has recorded no best checkpoint: use step=last, or a step it has kept")
        return open_checkpoint(step_directory(run_dir, chosen)), ()
    if not step.isdigit():
        raise CheckpointError(f"step={step}: use a number, best or last")
    directory = step_directory(run_dir, int(step))
    if not directory.is_dir():
        kept = ", ".join(str(step_of(kept)) for kept in step_directories(run_dir))
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step}; it has kept: {kept or 'none'}")
    return open_checkpoint(directory), ()


def open_checkpoint(directory: Path) -> CheckpointInfo:
    """Reads the manifest of one checkpoint and checks that its files are there at full size.

    Raises:
        CheckpointError: it cannot be used; the message names an older one of the same run, if any.
    """
    try:
        info = read_manifest(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {advice(directory)}") from error
    if found := problems(info):
        raise CheckpointError(f"{directory} cannot be used: {shorten(found)}. {advice(directory)}")
    return info


def older(info: CheckpointInfo) -> CheckpointInfo | None:
    """Returns the newest older checkpoint of the same run that `latest` would take; None: there is none."""
    usable = _usable_before(info.path)
    return None if usable is None else read_manifest(usable)


def is_one(path: Path) -> bool:
    """Returns whether a path names one checkpoint, not a run."""
    return STEP_NAME.fullmatch(path.name) is not None or (path / "manifest.json").is_file()


def _run_dir(path: Path) -> Path:
    return path.parent if path.name == "checkpoints" else path


def advice(damaged: Path) -> str:
    """Returns which older checkpoint of the same run to use in place of a damaged one."""
    usable = _usable_before(damaged)
    return "This run has no older checkpoint to use instead" if usable is None else f"Use {usable} instead"


def _usable_before(directory: Path) -> Path | None:
    older = [path for path in step_directories(directory.absolute().parent.parent) if path.name < directory.name]
    return next((path for path in reversed(older) if not problems_of(path)), None)


def _newest_run(run_root: Path) -> Path | None:
    """Returns the run with the newest manifest, one or two levels below: runs are often grouped by date."""
    saved: list[tuple[int, Path]] = []
    for home in [*run_root.glob("*/checkpoints"), *run_root.glob("*/*/checkpoints")]:
        for directory in step_directories(home.parent):
            with suppress(OSError):  # no manifest, or just pruned by a run in progress
                saved.append(((directory / "manifest.json").stat().st_mtime_ns, home.parent))
    return max(saved)[1] if saved else None
