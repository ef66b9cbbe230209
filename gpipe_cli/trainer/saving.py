"""Saves checkpoints in step with the loop: every worker writes its layers, rank 0 completes the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.files import RunState
from ..checkpoint.writer import CheckpointWriter
from ..distributed.exchange import Exchange
from ..distributed.world import World
from .update import Updater


class Saver:
    """Saves this worker's layers.

    Args:
        run_dir: shared by all workers.
        writer: of this worker; None on replicas other than 0, which hold the same weights.
        updater: gives the state of layers and learning rate schedule.
        configuration, data_fingerprint: saved with every checkpoint, compared when a run resumes.
        warn: called with a message about each old checkpoint that could not be deleted.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        writer: CheckpointWriter | None,
        updater: Updater,
        configuration: Mapping[str, Any],
        data_fingerprint: str | None,
        warn: Callable[[str], None],
    ) -> None:
        self._run_dir, self._world, self._writer, self._updater = run_dir, world, writer, updater
        self._configuration, self._data_fingerprint, self._warn = configuration, data_fingerprint, warn
        self._begun = -1  # the step saved last
        self._pending: tuple[int, RunState, tuple[str, float] | None] | None = None
        self._saved: Path | None = None

    @property
    def last_saved(self) -> str:
        """Returns the last complete checkpoint of this run, for messages."""
        return str(self._saved) if self._saved is not None else f"the newest in {self._run_dir / 'checkpoints'}, if any"

    def fields(self) -> dict[str, int]:
        """Returns the exchange's fields: the last step that each worker has written, plus one."""
        return {"written": self._world.workers}

    def begin(self, exchange: Exchange, progress: Mapping[str, Any], data_position: Any, is_best: bool) -> None:
        """Copies the worker's layers and writes them in the background, after the save before has ended.

        A second call at the same step only replaces the progress: the layers are saved already.
        """
        self.finish(exchange)
        step = int(progress["step"])
        state = RunState(
            data_position=data_position,
            schedule=self._updater.lr_state(),
            # JSON has no infinity and no NaN; None stands for the default, which is one of them.
            scalars={
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in progress.items()
                if key not in ("step", "stopped_by")
            },
            configuration=self._configuration,
            data_fingerprint=self._data_fingerprint,
        )
        best = ("loss", float(progress["best"])) if is_best else None
        if step == self._begun:
            if self._world.rank == 0:
                assert self._writer is not None
                self._writer.amend(step, state, best)
            return
        self._begun, self._pending = step, (step, state, best)
        if self._writer is not None:
            self._writer.begin(step, self._updater.layer_states())

    def report(self, exchange: Exchange) -> None:
        """Writes into the exchange the last step that this worker has written."""
        if self._writer is not None:
            exchange.own["written"][self._world.worker] = self._writer.finished_step + 1
            self._pass_on_warnings(self._writer)

    def read(self, exchange: Exchange) -> None:
        """Completes the checkpoint, on rank 0, once all workers have written."""
        if self._pending is None or not bool((exchange.total["written"] == self._pending[0] + 1).all()):
            return
        step, state, best = self._pending
        self._pending = None
        if self._world.rank == 0:
            assert self._writer is not None
            self._saved = self._writer.commit(step, state, self._world.workers, best).path

    def finish(self, exchange: Exchange) -> None:
        """Waits until the checkpoint that was begun is complete; every worker calls it at the same place."""
        if self._pending is not None:
            if self._writer is not None:
                self._writer.wait()
            self.report(exchange)
            exchange.run()
            self.read(exchange)
        if self._writer is not None:
            self._writer.wait()
            self._pass_on_warnings(self._writer)

    def _pass_on_warnings(self, writer: CheckpointWriter) -> None:
        for text in writer.take_warnings():
            self._warn(text)
