"""Defines `Pipeline`: a model's layers, cut into cells, and what runs mini-batches through them on all workers.

gpipe-train and loops of one's own (docs/library.md) use the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..config import PipelineConfig
from ..layers import LayerBuilder, own_name
from ..micro_batch import MicroBatch, Tensors
from ..partition.cut import Cut, cut_model
from ..pipeline.batchnorm import finish_batchnorm
from ..pipeline.cell import BuiltLayer
from ..pipeline.engine import TASK, Engine, StepInput, StepRecord
from ..pipeline.messages.transport import Transport, connect_workers
from ..pipeline.tied_parameters import ReplicaLink, TiedParameters
from ..position import Position
from ..schedule.instruction import Instruction, InstructionLists
from ..schedule.posting import Posts, post_ahead, post_when_sent
from ..schedule.schedule import forward_only, gradients_complete, kept_graphs, schedule
from ..tasks.base import Task
from ..tasks.own_loss import LossFunctionTask
from .batch_plan import BatchPlan, BatchPlanCodec, BatchShape
from .cells import build_cells
from .exchange import Exchange
from .unused import UnusedParameters
from .world import World, join_torchrun

Side: TypeAlias = "Tensor | Tensors"  # inputs or targets
Caches = dict[tuple[int, int], list[dict[str, Any]]]
"""What layers keep between the rounds of generation: by (cell, micro-batch), one dict a layer."""


@dataclass(frozen=True)
class MiniBatch:
    """Holds a mini-batch to be trained on.

    Attributes:
        plan: the same on every worker.
        micro_batches: on the worker of cell 0; None elsewhere.
        step, steps: number of the training step, from 0, and of all steps; 0 where the latter is not known.
        loss_scale: factor of the gradients.
    """

    plan: BatchPlan
    micro_batches: Sequence[MicroBatch] | None
    step: int
    steps: int = 0
    loss_scale: float = 1.0


class Pipeline:
    """Runs a model's layers on the workers of each replica, in training, evaluation and generation.

    Args:
        layers: of the whole model, the same on every worker, which builds those of its own cells.
        cut: of the layers into cells.
        config: K, M, schedule, remat or keep.
        task: gives loss and weight of a micro-batch.
        shape: of every micro-batch.
        world: the workers.
        seed: of initial weights and of dropout.
        autocast: makes the context in which forward runs.
        boundary_type: of floating-point tensors between two layers; None: as a layer returns them.
        where: kept up to date with what runs, for error reports.

    Attributes:
        cells: of this worker, in order.
        where: what this worker is doing.
        ties: the tied parameters of the model.
        training_lists: from a number of micro-batches to one list of instructions for each worker.
        codec: of batch plans; its M is the most micro-batches in flight.
        places: of all parameters of the model, in layer order, by full name.
        unused: finds the parameters that nothing has used in a step.
        steps_done: number of the next `step`; dropout depends on it.
    """

    def __init__(
        self,
        layers: Sequence[LayerBuilder],
        cut: Cut,
        config: PipelineConfig,
        task: Task,
        shape: BatchShape,
        world: World,
        seed: int = 0,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        boundary_type: torch.dtype | None = None,
        where: Position | None = None,
    ) -> None:
        self.world, self.cut, self.task, self.where = world, cut, task, Position() if where is None else where
        self.cells = build_cells(layers, cut, world, config, seed, boundary_type, self.where)
        for cell in self.cells:
            cell.train(True)
        transport = make_transport(world, cut.placement)
        targets = len(shape.targets)
        self.engine = Engine(
            self.cells, cut.placement, transport, task.loss, targets, world.device, autocast, self.where
        )
        self.kind, self.placement = config.schedule, cut.placement
        keep = partial(kept_graphs, config.policy, len(cut.placement))
        self.training_lists = cache(lambda M: schedule(self.kind, self.placement, M, keep(M)))
        self._training = cache(lambda M: self._own(self.training_lists(M)))
        self._forward = cache(lambda M: self._own(forward_only(self.placement, M)))
        self.codec = BatchPlanCodec(shape, config.M, world.replica, world.replicas)
        self.ties = TiedParameters(cut.uses([layer.name for layer in layers]), self.cells, _replica_link(world))
        own = [(cell.number, *named) for cell in self.cells for named in cell.parameters()]
        numbered = world.gather_from_workers((cell, name) for cell, name, _ in own)
        in_order = sorted(numbered, key=lambda one: one[0])
        self.places = {name: place for place, (_, name) in enumerate(in_order)}
        trained = {name: parameter for _, name, parameter in own}
        self.unused = UnusedParameters(self.places, trained, world.replicas * self.ties.most_uses)
        self.steps_done = 0

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerBuilder],
        loss: Callable[[Any, Any], Tensor] | Task,
        example: tuple[Side, Side],
        *,
        K: int,
        M: int,
        schedule: Any = "gpipe",
        remat: Any = "except_last",
        keep: Any = None,
        partition: Any = "auto",
        cost: Any = "flops",
        seed: int = 0,
        device: Any = "auto",
        backend: Any = "auto",
    ) -> Pipeline:
        """Joins the processes that torchrun has started, cuts the layers and builds this process's cells.

        Args:
            loss: (outputs, targets) to the mean over a micro-batch's examples; or a task (docs/your-own-model.md).
            example: inputs and targets of a micro-batch; only its shapes matter.
            K, M, schedule, remat, keep, partition, cost, device, backend: as keys of `pipeline` (README).

        Raises:
            ConfigurationError: the layers cannot be cut or run so.
        """
        world = join_torchrun(device, backend)
        config = PipelineConfig(
            K=K,
            M=M,
            remat=remat,
            keep=keep,
            schedule=schedule,
            partition=partition,
            cost=cost,
            devices=None,
            memory=None,
            workers=world.workers,
            replicas=1,
            threads=torch.get_num_threads(),
            backend=backend,
            device=device,
            sync_batchnorm=False,
            compile=False,
            shard_optimizer=False,
            auto=[],
        )
        micro_batch = _tensors(example[0]), _tensors(example[1])
        cut = world.broadcast(lambda: asdict(cut_model(layers, config, world.workers, micro_batch)))
        task = loss if isinstance(loss, Task) else LossFunctionTask(loss)
        made = cls(layers, Cut.from_json(cut), config, task, BatchShape.of(micro_batch), world, seed)
        for cell in made.cells:
            cell.guard_buffers()
        return made

    @property
    def layers(self) -> list[BuiltLayer]:
        """Returns the layers of this worker, in order."""
        return [layer for cell in self.cells for layer in cell.layers]

    # -- for a loop of one's own; every worker calls these at the same time ------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that this worker trains; a tied one belongs to the worker of its first layer."""
        return [parameter for cell in self.cells for _, parameter in cell.parameters()]

    def step(self, inputs: Side | None = None, targets: Side | None = None) -> float:
        """Runs forward and backward of a mini-batch, and adds its gradients to the parameters' ``.grad``.

        Args:
            inputs, targets: tensors whose first dimension counts examples; only those of rank 0 are used.

        Returns:
            the mean loss of the mini-batch, the same bits on every worker and for every K.
        """
        micro_batches, plan = self._announce(inputs, targets, "train")
        record = self.train_step(MiniBatch(plan, micro_batches, self.steps_done), timed=False)
        self.unused.fill(self.parameters())
        self.unused.owners = self.ties.add_gradients()
        finish_batchnorm([batchnorm for cell in self.cells for batchnorm in cell.batchnorms], None)
        for (layer, micro_batch), loss in record.losses.items():
            self._exchange.own["losses"].view(-1, self.codec.M)[layer, micro_batch] = loss.double()  # TASK: the last
        self.unused.write(self._exchange)
        self._exchange.run()
        self.unused.clear(self._exchange)
        self.steps_done += 1
        by_layer = self._exchange.total["losses"].view(-1, self.codec.M).tolist()
        return sum(sum(column) for column in zip(*by_layer, strict=True)) / plan.total_weight

    def forward(self, inputs: Side | None = None, targets: Side | None = None) -> list[MicroBatch]:
        """Runs a mini-batch forward in evaluation mode, without a graph; arguments as of `step`.

        Returns:
            (outputs, targets) of each micro-batch on the worker of the last cell; nothing elsewhere.
        """
        found: dict[int, MicroBatch] = {}

        def keep(micro_batch: int, outputs: Tensors, targets: Tensors) -> None:
            found[micro_batch] = outputs, targets

        micro_batches, plan = self._announce(inputs, targets, "evaluate")
        for cell in self.cells:
            cell.train(False)
        self.run_forward(plan.signatures, micro_batches, keep)
        for cell in self.cells:
            cell.train(True)
        return [found[number] for number in sorted(found)]

    def state_dict(self) -> dict[str, Tensor]:
        """Returns weights and buffers of this worker's layers, by their names in the whole model."""
        self.ties.spread()
        return {
            own_name(layer.name, name): value
            for layer in self.layers
            for name, value in layer.module.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes this worker's weights and buffers from a state_dict of the whole model, or of these layers.

        Raises:
            KeyError: one of them is missing.
        """
        for layer in self.layers:
            own = {name: state[own_name(layer.name, name)] for name in layer.module.state_dict()}
            layer.module.load_state_dict(own)

    @cached_property
    def _exchange(self) -> Exchange:
        layers = len(self.cut.ties) - TASK
        fields = {**self.codec.fields(), **self.unused.fields(), "newly_trained": 1, "losses": layers * self.codec.M}
        return Exchange(fields, self.world.all_ranks)

    def _announce(
        self, inputs: Side | None, targets: Side | None, kind: str
    ) -> tuple[list[MicroBatch] | None, BatchPlan]:
        """Returns the micro-batches on rank 0, and their plan on every worker, whose tied parameters agree then."""
        self.ties.spread()  # the owners' values after the optimizer's step
        micro_batches = None
        if self.world.reads_data:
            assert inputs is not None and targets is not None, "rank 0 gives inputs and targets"
            sides = [_tensors(side) for side in (inputs, targets)]
            M = min(self.codec.M, len(sides[0][0]))
            pieces = [zip(*(tensor.tensor_split(M) for tensor in side), strict=True) for side in sides]
            micro_batches = list(zip(*pieces, strict=True))
            self.write_plan(self._exchange, micro_batches)
        self._exchange.own["newly_trained"][0] = len(self.engine.newly_trained)
        self._exchange.run()
        if self._exchange.total["newly_trained"].any():
            self.engine.describe_anew()
        return micro_batches, self.codec.read(self._exchange, kind)

    # -- for gpipe-train, which reads and announces mini-batches itself ----------------------------------------

    def write_plan(self, exchange: Exchange, micro_batches: Sequence[MicroBatch]) -> None:
        """Writes the plan of this replica's next mini-batch; none are left after its last."""
        self.codec.write(exchange, micro_batches, [self.task.weight(targets) for _, targets in micro_batches])

    def train_step(
        self,
        mini_batch: MiniBatch,
        on_complete: Callable[[int], None] | None = None,
        timed: bool = True,
    ) -> StepRecord:
        """Runs forward and backward of one mini-batch.

        Args:
            on_complete: called with the number of each cell as soon as its gradients are complete and on their way.
            timed: as in `Engine.train_step`.
        """
        plan = mini_batch.plan
        instructions, posts = self._training(len(plan.signatures))
        scale = mini_batch.loss_scale / plan.total_weight if plan.total_weight else 0.0
        step_input = StepInput(mini_batch.step, mini_batch.steps, plan.signatures, scale)
        after: dict[int, Callable[[], None]] = {}
        if on_complete is not None:
            cells = gradients_complete(instructions)
            after = {position: partial(on_complete, cell) for position, cell in cells.items()}
        return self.engine.train_step(instructions, step_input, mini_batch.micro_batches, posts, timed, after)

    def run_forward(
        self,
        signatures: Sequence[tuple[object, ...]],
        micro_batches: Sequence[MicroBatch] | None,
        sink: Callable[[int, Tensors, Tensors], None],
        caches: Caches | None = None,
    ) -> None:
        """Runs micro-batches forward only; the arguments are those of `Engine.run_forward`."""
        instructions, posts = self._forward(len(signatures))
        self.engine.run_forward(instructions, signatures, micro_batches, sink, caches, posts)

    def _own(self, lists: InstructionLists) -> tuple[Sequence[Instruction], Posts]:
        """Returns this worker's list, and when it posts its receives."""
        own = lists[self.world.worker]
        return own, post_when_sent(lists)[self.world.worker] if self.engine.receives_block_device else post_ahead(own)


def _tensors(value: Side) -> Tensors:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _replica_link(world: World) -> ReplicaLink:
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
