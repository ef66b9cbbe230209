"""Writes checkpoints; the layout is in `files.py`.

Workers save together, although they meet only once per training step:

1. every worker calls ``begin(step, layers)``; a thread adds the files of its layers to a ``.partial`` directory while
   training goes on;
2. every worker reports ``finished_step`` at each meeting;
3. when all have reported the step, worker 0 calls ``commit``: the checkpoint becomes complete by one rename of that
   directory. A kill at any moment leaves the previous checkpoint as it was.
"""

import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from ..disk import whole_file, writing
from ..json_files import read_json
from ..version import __version__
from . import files
from .layer_state import LayerState, write_layer


@dataclass
class CheckpointWriter:
    """Writes one worker's layers. All methods are called by the worker's main thread.

    An error in the background is raised by the next call of any method, as a DiskError.

    Attributes:
        run_dir: the run directory, on a file system that all workers share.
        worker: number of this worker, 0 … workers−1. Worker 0 commits.
        model: names of all layers of the whole model, in its order; only worker 0 needs them.
        keep: number of checkpoints to keep beside the best one. For a while there is one more on disk.
        device: the kind of device that computes, as "cuda"; kept with every checkpoint.
    """

    run_dir: Path
    worker: int
    model: Sequence[str]
    keep: int = 2
    device: str = "cpu"
    _finished_step: int = -1

    def __post_init__(self) -> None:
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[None]] = []

    def begin(self, step: int, layers: Mapping[str, LayerState], written: Callable[[], None] | None = None) -> None:
        """Copies ``layers`` to the CPU and starts to write them. It first waits until the previous step is written.

        Every worker calls it for the same step. With replicas each layer is given by one worker only.

        Args:
            written: function that is called after each layer is written, all without copies and before this returns;
                None: copies are written in the background.
        """
        self.wait()
        if written is not None:
            self._write(step, layers, written)
            return
        snapshot = {name: state.copied() for name, state in layers.items()}
        self._jobs.append(self._background.submit(self._write, step, snapshot))

    @property
    def finished_step(self) -> int:
        """Returns the last step whose files of this worker are on disk, −1 before the first."""
        self._raise_failure()
        return self._finished_step

    def commit(self, step: int, state: files.RunState, workers: int) -> files.CheckpointInfo:
        """Makes the checkpoint complete, then prunes older ones. Worker 0 calls it when all have reported ``step``.

        Args:
            workers: the number of workers that wrote a part.

        Raises:
            CheckpointError: what was saved is not the whole model; the checkpoint stays partial.
            DiskError: it cannot be written.
        """
        self._raise_failure()
        final = files.step_directory(self.run_dir, step)
        partial = final.with_suffix(files.PARTIAL)
        with self._writing(partial):
            self._complete(files.CheckpointInfo(partial, step, state, {}, versions(self.device)), final, workers)
        self._jobs.append(self._background.submit(prune, self.run_dir, self.keep))
        return files.read_manifest(final)

    def _complete(self, info: files.CheckpointInfo, final: Path, workers: int) -> None:
        """Joins the workers' lists of files in the manifest, and renames the partial directory to ``final``."""
        parts = [part_path(info.path, worker) for worker in range(workers)]
        written: dict[str, files.LayerFile] = {}
        for path in parts:
            written |= {file.name: file for file in read_json(path, list[files.LayerFile])}
        if differing := written.keys() ^ {*self.model}:
            raise files.CheckpointError(
                f"the checkpoint of step {info.step} is not the model and was not kept; not in both: "
                + files.shorten(sorted(differing))
            )
        for path in parts:
            path.unlink()
        write_manifest(replace(info, layers={name: written[name] for name in self.model}))
        sync_directory(info.path.rename(final).parent)

    def amend(self, step: int, state: files.RunState) -> None:
        """Replaces the progress (`scalars`) in the manifest of the complete checkpoint of ``step``; worker 0 only."""
        directory = files.step_directory(self.run_dir, step)
        with self._writing(directory):
            info = files.read_manifest(directory)  # its other values belong to its layers, and stay
            write_manifest(replace(info, state=replace(info.state, scalars=state.scalars)))
        self._jobs.append(self._background.submit(prune, self.run_dir, self.keep))  # the former best one may go

    def wait(self) -> None:
        """Waits until everything that was begun is on disk."""
        while self._jobs:
            self._jobs.pop(0).result()

    def _write(
        self, step: int, layers: Mapping[str, LayerState], after_each: Callable[[], None] = lambda: None
    ) -> None:
        """Writes layers, then the list of their files, into the partial directory of ``step``."""
        directory = files.step_directory(self.run_dir, step).with_suffix(files.PARTIAL)
        with self._writing(directory):
            directory.parent.mkdir(exist_ok=True)  # but never the run directory
            (directory / "layers").mkdir(parents=True, exist_ok=True)
            written = []
            for name, state in layers.items():
                written.append(write_layer(directory, step, name, state))
                after_each()
            sync_directory(directory / "layers")
            write_json(part_path(directory, self.worker), [asdict(file) for file in written])
        self._finished_step = step

    def _raise_failure(self) -> None:
        """Raises the error of a background job that has ended with one."""
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()

    def _writing(self, path: Path) -> AbstractContextManager[None]:
        """Returns a context that turns an OSError about a checkpoint's directory into a DiskError."""
        earlier = f"checkpoint.resume={self.run_dir}: earlier checkpoints are untouched"
        again = earlier if files.step_directories(self.run_dir) else "the same again: this run had saved no step"
        advice = f"free disk space or restore the right to write, then type {again}"
        return writing(path, advice)


# --- files of a run -------------------------------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    """Writes JSON in place of ``path``, so that a kill leaves either the old content or the new."""
    with whole_file(path) as draft, draft.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flushes a directory's entries (new files, renames) to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def part_path(directory: Path, worker: int) -> Path:
    """Returns the file of a partial checkpoint that lists the files of one worker."""
    return directory / f"part_{worker}.json"


def write_manifest(info: files.CheckpointInfo) -> None:
    """Writes the manifest of a checkpoint whose files are all there."""
    content = {"format": files.FORMAT, "step": info.step, "state": asdict(info.state), "versions": dict(info.versions)}
    write_json(info.path / "manifest.json", {**content, "layers": [asdict(file) for file in info.layers.values()]})


def versions(device: str) -> dict[str, str]:
    """Returns the release of each package that writes a checkpoint, and the kind of device."""
    own = {"gpipe-cli": __version__, "python": platform.python_version(), "device": device}
    return own | {package: version(package) for package in ("torch", "safetensors", "babel", "sentencepiece")}


def prune(run_dir: Path, keep: int) -> None:
    """Deletes all checkpoints but the best and the ``keep`` newest undamaged ones, and those discarded before.

    One that cannot be deleted is left to the next call.
    """
    best, undamaged = files.best_step(run_dir), 0
    for directory in reversed(files.step_directories(run_dir)):
        if undamaged >= keep and files.step_of(directory) != best:
            with suppress(OSError):
                _discard(directory)
        elif files.is_whole(directory):
            undamaged += 1
    _delete(run_dir, files.DISCARDED)


def prepare_directory(run_dir: Path, resumed: files.CheckpointInfo | None) -> None:
    """Prepares the run directory, once, before any worker saves.

    Partial checkpoints of a killed run are removed. Checkpoints later than the one resumed from (they were
    damaged, or the user went back on purpose) are discarded, and deleted when the first new checkpoint is complete: the
    directory always holds one training.

    Raises:
        CheckpointError: the directory holds checkpoints and the run does not continue from one of them.
        DiskError: it cannot be made.
    """
    files.refuse_another_run(run_dir, resumed)
    home, existing = files.checkpoints_directory(run_dir), files.step_directories(run_dir)
    with writing(home):
        home.mkdir(exist_ok=True)
    for folder in (home.parent, home.parent.parent):  # a checkpoint is safe only when its folder is
        sync_directory(folder)
    _delete(run_dir, files.PARTIAL)
    _delete(run_dir, files.DISCARDED)
    for directory in existing:
        if resumed is not None and files.step_of(directory) > resumed.step:
            _discard(directory)


def _discard(directory: Path) -> None:
    """Discards a checkpoint by one rename: a kill while its files are deleted would leave a damaged one."""
    target = directory.with_name(f"{directory.name}{files.DISCARDED}")
    if target.exists():
        shutil.rmtree(target)
    directory.rename(target)


def _delete(run_dir: Path, suffix: str) -> None:
    """Deletes the directories of checkpoints whose names end in ``suffix``."""
    for directory in files.checkpoints_directory(run_dir).glob(f"step_*{suffix}"):
        shutil.rmtree(directory, ignore_errors=True)
