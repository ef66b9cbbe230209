"""Defines the writer of one worker's layers: it copies them and writes the copy in the background.

Workers save together, although they meet only once per training step:

1. every worker calls ``begin(step, layers)`` and goes on training while a thread writes its files;
2. every worker reports ``finished_step`` at each meeting;
3. when all have reported the step, worker 0 calls ``commit``, which makes the checkpoint complete.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from ..disk import DiskError, Vanished, cannot_write
from . import commit
from .files import (
    CheckpointInfo,
    RunState,
    layer_path,
    partial_directory,
    step_directory,
    with_suffix,
)
from .layer_state import LayerState, write_layer


class CheckpointWriter:
    """Writes one worker's layers. All methods are called by the worker's main thread.

    An error in the background is raised by the next call of any method, as a DiskError.

    Args:
        run_dir: the run directory, on a file system that all workers share.
        worker: this worker's number, 0 … workers−1. Worker 0 commits.
        model: parameter names of every layer of the whole model, in model order; only worker 0 needs it.
        keep: how many checkpoints to keep beside the best one. For a while there is one more on disk.
        device: the kind of device that computes, as "cuda"; kept with every checkpoint.
    """

    def __init__(
        self, run_dir: Path, worker: int, model: Mapping[str, Collection[str]], keep: int = 2, device: str = "cpu"
    ) -> None:
        self._run_dir = run_dir
        self._worker = worker
        self._model = model
        self._keep = keep
        self._device = device
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[None]] = []
        self._finished_step = -1

    def begin(self, step: int, layers: Mapping[str, LayerState]) -> None:
        """Copies ``layers`` to the CPU and starts to write them; waits first while the previous step is being written.

        Every worker calls it for the same step. With replicas each layer is given by one worker only.
        """
        self.wait()
        snapshot = {name: state.copied() for name, state in layers.items()}
        self._jobs.append(self._background.submit(self._write, step, snapshot))

    @property
    def finished_step(self) -> int:
        """Returns the last step whose files of this worker are on disk, −1 before the first."""
        self._raise_failure()
        return self._finished_step

    def commit(self, step: int, state: RunState, workers: int, best: tuple[str, float] | None = None) -> CheckpointInfo:
        """Makes the checkpoint complete (worker 0, once all workers have reported ``step``), then prunes older ones.

        Args:
            best: metric name and value if this checkpoint is the best so far.

        Raises:
            CheckpointError: what was saved is not the whole model; the missing layers and parameters are named.
            DiskError: it cannot be written.
        """
        self._raise_failure()
        try:
            info = commit.complete(self._run_dir, step, state, workers, self._model, self._device)
            if best is not None:
                commit.record_best(self._run_dir, step, *best)
        except OSError as error:
            raise self._failure("completing", step_directory(self._run_dir, step), error) from error
        self._jobs.append(self._background.submit(commit.prune, self._run_dir, self._keep))
        return info

    def amend(self, step: int, state: RunState, best: tuple[str, float] | None = None) -> None:
        """Replaces the run state of the complete checkpoint of ``step`` (worker 0); ``best`` as in `commit`."""
        try:
            commit.amend(self._run_dir, step, state)
            if best is not None:
                commit.record_best(self._run_dir, step, *best)
        except OSError as error:
            raise self._failure("amending", step_directory(self._run_dir, step), error) from error
        if best is not None:  # the former best one may go
            self._jobs.append(self._background.submit(commit.prune, self._run_dir, self._keep))

    def wait(self) -> None:
        """Returns when everything begun is on disk: before the last report, and at the end of the run."""
        while self._jobs:
            self._jobs.pop(0).result()

    def _write(self, step: int, layers: Mapping[str, LayerState]) -> None:
        directory = partial_directory(self._run_dir, step)
        try:
            for folder in (directory.parent, directory, directory / "layers"):  # but never the run directory
                folder.mkdir(exist_ok=True)
            written = {name: write_layer(directory, step, name, state) for name, state in layers.items()}
            commit.sync_directory(directory / "layers")
            commit.write_part(directory, self._worker, written)
        except (OSError, SafetensorError) as error:
            failure = self._failure("writing", directory, error)
            for path in (layer_path(directory, name) for name in layers):  # room for other files: the rest is useless
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    with_suffix(path, ".tmp").unlink(missing_ok=True)
            raise failure from error
        self._finished_step = step

    def _raise_failure(self) -> None:
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()

    def _failure(self, action: str, path: Path, error: OSError | SafetensorError) -> DiskError:
        if not self._run_dir.is_dir():
            return Vanished(self._run_dir)
        reason = cannot_write(path, error) if isinstance(error, OSError) else f"{path}: {error}"
        return DiskError(
            f"worker {self._worker}, {action}: {reason}. Earlier checkpoints are untouched: free disk space or restore "
            f"the right to write, then type checkpoint.resume={self._run_dir}"
        )
