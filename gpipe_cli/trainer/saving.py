"""Saves checkpoints in step with the loop: every worker writes its layers, rank 0 completes the checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.files import RunState
from ..checkpoint.writer import CheckpointWriter
from ..distributed.step_message import StepMessage
from ..metrics.metrics_file import json_safe
from .update import Updater


@dataclass
class Saver:
    """Saves this worker's layers.

    Attributes:
        run_dir: shared by all workers.
        message: the numbers that all workers exchange once per step.
        writer: this worker's writer; None on replicas other than 0, which hold the same weights.
        updater: gives the state of layers.
        state: facts that every checkpoint holds of the run: configuration, fingerprint of the data, vocabularies.
        saved_step: the step whose layers are on disk or being written; -1: none.
        pending: step and state of the checkpoint that is being written.
    """

    run_dir: Path
    message: StepMessage
    writer: CheckpointWriter | None
    updater: Updater
    state: RunState
    saved_step: int = -1
    pending: tuple[int, RunState] | None = None

    def begin(self, progress: Mapping[str, Any], data_position: Any) -> None:
        """Copies the worker's layers and writes them in the background, after the previous save has ended.

        If the layers of this step are saved already, only the saved state is replaced.

        Args:
            progress: "step" and the other numbers of the run that a checkpoint keeps.
            data_position: the place in the data from which a resumed run goes on reading.
        """
        self.finish()
        step = int(progress["step"])
        state = replace(
            self.state,
            data_position=data_position,
            # None, in place of infinity and NaN, stands for the default, which is one of them.
            scalars=json_safe({key: value for key, value in progress.items() if key not in ("step", "stopped_by")}),
        )
        if step == self.saved_step:
            if self.message.world.rank == 0 and self.writer is not None:
                self.writer.amend(step, state)
            return
        self.saved_step, self.pending = step, (step, state)
        layers = self.updater.layer_states(keep=self.writer is not None)
        if self.writer is not None:
            self.writer.begin(step, layers, self.updater.take_away if self.updater.is_offloaded else None)

    def tell_written_step(self) -> None:
        """Puts the last step that this worker has written into the next message to the others."""
        if self.writer is not None:
            self.message.write_saved(self.writer.finished_step)

    def complete(self) -> None:
        """Completes the pending checkpoint on rank 0, once the layers of all workers are on disk."""
        if self.pending is None or not self.message.is_saved(self.pending[0]):
            return
        (step, state), world = self.pending, self.message.world
        self.pending = None
        if world.rank == 0 and self.writer is not None:
            self.writer.commit(step, state, world.workers)

    def finish(self) -> None:
        """Waits until the checkpoint that was begun is complete; every worker calls it at the same place."""
        if self.pending is not None:
            if self.writer is not None:
                self.writer.wait()
            self.tell_written_step()
            self.message.run()
            self.complete()
        if self.writer is not None:
            self.writer.wait()  # for the removal of older checkpoints, which `complete` or an amendment began
