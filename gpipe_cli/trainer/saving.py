"""Checkpoints in step with the loop: begun by every worker, made complete by rank 0 when all have written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.files import RunState
from ..checkpoint.layer_state import LayerState, layer_state
from ..checkpoint.lr_schedule_state import LRScheduleState
from ..checkpoint.writer import CheckpointWriter
from ..distributed.exchange import Exchange
from ..distributed.world import World
from ..optim.average import WeightAverage
from ..pipeline.cell import BuiltLayer, Cell


class Saver:
    """This worker's share of saving.

    Args:
        run_dir: shared by all workers.
        world: replica 0 writes; the others hold the same weights.
        cells: whose layers this worker writes.
        model: parameter names of every layer of the model, in order.
        keep: checkpoints kept beside the best.
        configuration, data_fingerprint: saved with every checkpoint, compared when a run resumes.
        average: of the weights of these cells; None: there is none.
        warn: is told of an old checkpoint that could not be deleted.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        cells: Sequence[Cell],
        model: Mapping[str, Sequence[str]],
        keep: int,
        configuration: Mapping[str, Any],
        data_fingerprint: str | None,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduleState,
        average: WeightAverage | None,
        warn: Callable[[str], None],
    ) -> None:
        self._world, self._cells, self._run_dir = world, cells, run_dir
        self._configuration, self._optimizer, self._schedule = configuration, optimizer, schedule
        self._data_fingerprint = data_fingerprint
        self._average, self._warn = average, warn
        self._writer = CheckpointWriter(run_dir, world.worker, model, keep) if world.replica == 0 else None
        self._begun = -1  # the step saved last
        self._pending: tuple[int, RunState, tuple[str, float] | None] | None = None
        self._saved: Path | None = None

    def fields(self) -> dict[str, int]:
        """The exchange's fields that this needs: the last step that each worker has written, plus one."""
        return {"written": self._world.workers}

    def begin(self, exchange: Exchange, progress: Mapping[str, Any], data_position: Any, is_best: bool) -> None:
        """Copies the worker's layers and writes them in the background; first ends the previous save.

        For the second time at the same step it only replaces the progress: the layers are there.
        """
        self.finish(exchange)
        step = int(progress["step"])
        state = RunState(
            data_position=data_position,
            schedule=self._schedule.save(),
            # JSON knows no infinity and no NaN: what is still at its default is left to the default again.
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
            self._writer.begin(step, {layer.name: self._state(layer) for cell in self._cells for layer in cell.layers})

    def _state(self, layer: BuiltLayer) -> LayerState:
        averages = self._average.of(layer.name) if self._average is not None else None
        return layer_state(layer.module, self._optimizer, averages)

    def report(self, exchange: Exchange) -> None:
        """Tells the others how far this worker's writing has come."""
        if self._writer is not None:
            exchange.own["written"][self._world.worker] = self._writer.finished_step + 1
            self._tell_warnings(self._writer)

    def read(self, exchange: Exchange) -> None:
        """Rank 0 makes the checkpoint complete once everybody has written."""
        if self._pending is None or not bool((exchange.total["written"] == self._pending[0] + 1).all()):
            return
        step, state, best = self._pending
        self._pending = None
        if self._world.rank == 0:
            assert self._writer is not None
            self._saved = self._writer.commit(step, state, self._world.workers, best).path

    def finish(self, exchange: Exchange) -> None:
        """Waits until a checkpoint that was begun is complete; every worker calls it at the same place."""
        if self._pending is not None:
            if self._writer is not None:
                self._writer.wait()
            self.report(exchange)
            exchange.run()
            self.read(exchange)
        if self._writer is not None:
            self._writer.wait()
            self._tell_warnings(self._writer)

    def _tell_warnings(self, writer: CheckpointWriter) -> None:
        for text in writer.take_warnings():
            self._warn(text)

    def last_saved(self) -> str:
        """For messages: the last complete checkpoint of this run."""
        return str(self._saved) if self._saved is not None else f"the newest in {self._run_dir / 'checkpoints'}, if any"
