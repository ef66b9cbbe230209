"""Defines `PipelineRuntime`: what runs mini-batches through the workers of a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..micro_batch import MicroBatch, Tensors
from ..pipeline.engine import Engine, StepInput, StepRecord
from ..pipeline.finite import FiniteWatch
from ..pipeline.messages.transport import Transport, connect_workers
from ..pipeline.tied_parameters import ReplicaLink
from ..schedule.run_schedules import RunSchedules
from .batch_plan import BatchPlan, BatchPlanCodec
from .world import World

Caches = dict[tuple[int, int], list[dict[str, Any]]]
"""What layers keep between the rounds of generation: by (cell, micro-batch), one dict a layer."""


@dataclass(frozen=True)
class PipelineRuntime:
    """Holds what runs mini-batches on this worker, in training, evaluation and generation.

    Attributes:
        engine: with this worker's cells.
        schedules: the instruction lists of the run.
        codec: of batch plans; its M is the most micro-batches in flight.
    """

    world: World
    engine: Engine
    schedules: RunSchedules
    codec: BatchPlanCodec

    def train_step(
        self,
        plan: BatchPlan,
        step: int,
        steps: int,
        micro_batches: Sequence[MicroBatch] | None,
        loss_scale: float = 1.0,
        watch: FiniteWatch | None = None,
        on_complete: Callable[[int], None] | None = None,
    ) -> StepRecord:
        """Runs forward and backward of one mini-batch.

        Args:
            step, steps: number of the training step, from 0, and of all steps; 0 where the latter is not known.
            micro_batches: on the worker of cell 0; None elsewhere.
            loss_scale: factor of the gradients.
            watch: as in `Engine.train_step`.
            on_complete: called with the number of each cell as soon as its gradients are complete and on their way.
        """
        M, worker = len(plan.signatures), self.world.worker
        posts = self.schedules.training_posts(M, self.engine.receives_block_device)[worker]
        step_input = StepInput(
            step, steps, plan.signatures, loss_scale / plan.total_weight if plan.total_weight else 0.0
        )
        instructions = self.schedules.training_lists(M)[worker]
        after: dict[int, Callable[[], None]] = {}
        if on_complete is not None:
            cells = self.schedules.gradients_complete(M)[worker]
            after = {position: partial(on_complete, cell) for position, cell in cells.items()}
        return self.engine.train_step(instructions, step_input, micro_batches, posts, watch, after)

    def run_forward(
        self,
        signatures: Sequence[tuple[object, ...]],
        micro_batches: Sequence[MicroBatch] | None,
        sink: Callable[[int, Tensors, Tensors], None],
        caches: Caches | None = None,
    ) -> None:
        """Runs micro-batches forward only; the arguments are those of `Engine.run_forward`."""
        M, worker = len(signatures), self.world.worker
        posts = self.schedules.forward_posts(M, self.engine.receives_block_device)[worker]
        instructions = self.schedules.forward_lists(M)[worker]
        self.engine.run_forward(instructions, signatures, micro_batches, sink, caches, posts)


def replica_link(world: World) -> ReplicaLink:
    """Returns how this worker reaches those of its replica for tied parameters."""
    group = None if world.message_groups is None else world.message_groups[0]
    return ReplicaLink(world.worker, [world.rank_of(worker) for worker in range(world.workers)], group)


def make_transport(world: World, placement: Sequence[int]) -> Transport | None:
    """Returns the transport between this replica's workers; None where all cells live on one worker.

    Args:
        placement: worker of each cell.
    """
    if world.workers == 1 or world.message_groups is None or world.all_ranks is None:
        return None
    ranks = tuple(world.rank_of(worker) for worker in placement)
    return connect_workers(ranks, world.device, world.wire, world.message_groups, world.all_ranks)
