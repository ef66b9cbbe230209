"""Defines `WorkerPipeline`: a model's layers, cut into cells, and the runs of mini-batches through them on all workers.

gpipe-train uses it; `library/pipeline.py` makes of it what loops of one's own use.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import nn

from ..config import PipelineConfig
from ..gpus import GPU
from ..launch.local_group import LocalGroup
from ..layers import LayerBuilder, Owner, announce, own_name
from ..micro_batch import MicroBatch, Tensors
from ..partition.cut import Cut
from ..pipeline.cell import BuiltLayer, Cell, build_layer
from ..pipeline.engine import TASK, Caches, Engine
from ..pipeline.gradients import UnusedParameters
from ..pipeline.messages.shared_memory import SharedMemoryTransport
from ..pipeline.messages.transport import Transport
from ..pipeline.offload import HostMemory, StateFile
from ..pipeline.randomness import NoiseSource
from ..pipeline.step import StepPlan, StepRecord
from ..pipeline.tied_parameters import TiedParameters
from ..position import Position
from ..schedule.early import post_early
from ..schedule.instruction import Instruction, InstructionLists
from ..schedule.posting import Posts, post_ahead
from ..schedule.schedule import StepSchedule, forward_only
from ..tasks.base import Task
from .step_message import BatchShape, StepMessage
from .world import World


class WorkerPipeline:
    """Runs a model's layers on the workers of each replica, in training, evaluation and generation.

    Args:
        layers: builders of the whole model, the same on every worker, which builds those of its own cells.
        cut: the layers of each cell, and the worker that runs it.
        config: the section `pipeline`, with K, M, schedule, remat or keep.
        task: computes loss and weight of a micro-batch.
        shape: dimensions of every micro-batch's tensors.
        world: the workers.
        seed: decides initial weights and dropout.
        autocast: makes the context in which forward runs.
        boundary_type: type of floating-point tensors between two layers; None: as a layer returns them.
        where: kept up to date with what runs, for error reports.

    Attributes:
        cells: this worker's cells, in order.
        where: says what this worker is doing, for error reports.
        ties: the tied parameters of the model.
        schedule: schedule of a training step.
        message: the numbers that all workers exchange once per step.
        shape, M: dimensions of every micro-batch's tensors; the most micro-batches in flight.
        unused: finds the parameters that nothing has used in a step.
        steps_done: number of the next `step`; dropout depends on it.
        forwards: run since the last step, or since an evaluation began; noise in evaluation depends on it.
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
        transport = make_transport(world, cut.placement)
        targets = len(shape.targets)
        self.engine = Engine(
            self.cells, cut.placement, transport, task.loss, targets, world.device, autocast, self.where
        )
        self.shape, self.M = shape, config.M
        self.schedule = StepSchedule(config.schedule, cut.placement, config.policy, config.offload)
        self._training = cache(lambda M: self._own(self.schedule.lists(M)))
        self._forward = cache(lambda M: self._own(forward_only(cut.placement, M, config.offload)))
        uses, ranks = cut.uses([layer.name for layer in layers]), [world.rank_of(w) for w in range(world.workers)]
        group = None if world.message_groups is None else world.message_groups[0]
        self.ties = TiedParameters(uses, self.cells, world.worker, ranks, group)
        own = {name: parameter for cell in self.cells for name, parameter in cell.parameters()}
        cells = sorted(world.gather_from_workers(map(_names_and_losses, self.cells)))
        places = {name: place for place, name in enumerate(name for _, names, _ in cells for name in names)}
        losses = [*(layer for _, _, layers in cells for layer in layers), TASK]
        self.unused = UnusedParameters(own)
        self.message = StepMessage(world, shape, config.M, len(cut.placement), losses, places, own, task)
        self.steps_done = self.forwards = 0

    @property
    def layers(self) -> list[BuiltLayer]:
        """Returns the layers of this worker, in order."""
        return [layer for cell in self.cells for layer in cell.layers]

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that this worker trains; a tied one belongs to the worker of its first layer."""
        return [parameter for cell in self.cells for _, parameter in cell.parameters()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this worker trains by their names in the whole model."""
        for layer in self.layers:
            for name, parameter in layer.module.named_parameters():
                if name not in layer.tied:
                    yield own_name(layer.name, name), parameter

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts the layers into evaluation mode while the context lasts; then each part has the mode it had before."""
        modes = [(part, part.training) for layer in self.layers for part in layer.module.modules()]
        for cell in self.cells:
            cell.train(False)
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode

    def write_plan(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Writes the plan of this replica's next mini-batch into the message; an empty one after its last."""
        self.message.write_plan(micro_batches, [self.task.weight(targets) for _, targets in micro_batches])

    def train_step(
        self, plan: StepPlan, timed: bool = True, cell_ended: Callable[[int], None] | None = None
    ) -> StepRecord:
        """Runs forward and backward of one mini-batch; ``timed`` and ``cell_ended`` as in `Engine.train_step`."""
        instructions, posts = self._training(len(plan.signatures))
        return self.engine.train_step(instructions, plan, posts, timed, cell_ended)

    def run_forward(
        self, plan: StepPlan, sink: Callable[[int, Tensors, Tensors], None], caches: Caches | None = None
    ) -> None:
        """Runs micro-batches forward only; the arguments are those of `Engine.run_forward`."""
        instructions, posts = self._forward(len(plan.signatures))
        number, self.forwards = (self.steps_done, self.forwards), self.forwards + 1
        self.engine.run_forward(instructions, plan, sink, caches, posts, number)

    def _own(self, lists: InstructionLists) -> tuple[Sequence[Instruction], Posts]:
        """Returns this worker's list of those of all workers, and when it posts its receives."""
        own = lists[self.world.worker]
        return own, post_early(lists)[self.world.worker] if self.engine.receives_block_device else post_ahead(own)


def build_cells(
    builders: Sequence[LayerBuilder],
    cut: Cut,
    world: World,
    config: PipelineConfig,
    seed: int,
    boundary_type: torch.dtype | None,
    where: Position,
) -> list[Cell]:
    """Builds this worker's cells on its device, and no others.

    Args:
        boundary_type: type of floating-point tensors between two layers; None: as a layer returns them.
        where: shown with an error.
    """
    held: set[int] = set()

    def build(index: int) -> BuiltLayer:
        where.layer = builders[index].name
        module = unshared(build_layer(builders[index], index, seed, world.device), held)
        passed = boundary_type if index < len(builders) - 1 else None
        tied, may_vary = _with_all_names(cut.ties[index], module), index in (*cut.varying, len(builders) - 1)
        return BuiltLayer(index, builders[index].name, module, passed, tied, may_vary)

    noise = NoiseSource(seed, world.replica, world.device)
    group = world.replica_group if config.sync_batchnorm else None
    own = {cell: layers for cell, layers in enumerate(cut.layers) if cut.placement[cell] == world.worker}
    announce(builders[index] for layers in own.values() for index in layers)
    cells, elsewhere = [], _memory_for_state(config, world.device) if config.offload else None
    shared = {str(owner) for ties in cut.ties for owner in ties.values()}
    for cell, layers in own.items():
        where.enter(cell, None, "building")
        made = Cell(cell, [build(index) for index in layers], noise, group, config.compile)
        if elsewhere is not None:
            made.offload(elsewhere, shared)
        cells.append(made)
    where.leave()
    return cells


def _memory_for_state(config: PipelineConfig, device: torch.device) -> StateFile | HostMemory:
    """Returns where the state of this worker's cells lies: on a GPU in the host's memory, on a CPU on disk."""
    return StateFile(config.offload_dir or ".") if device.type == "cpu" else HostMemory(device)


def unshared(module: nn.Module, held: set[int]) -> nn.Module:
    """Returns the module, or a copy if an earlier layer has one of its tensors.

    So every use of a shared parameter has gradients of its own, and a BatchNorm in a module that several layers share
    has statistics for each of them.

    Args:
        held: ids of the tensors of earlier layers; those of this one are added.
    """
    tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    if tensors & held:
        module = deepcopy(module)
        tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    held |= tensors
    return module


def _with_all_names(tied: Mapping[str, Owner], module: nn.Module) -> dict[str, Owner]:
    """Returns the owner of each tied parameter under all names that it has in its layer."""
    named = dict(module.named_parameters(remove_duplicate=False))
    owners = {id(named[name]): owner for name, owner in tied.items()}
    return {name: owners[id(parameter)] for name, parameter in named.items() if id(parameter) in owners}


def _names_and_losses(cell: Cell) -> tuple[int, list[str], list[int]]:
    """Returns a cell's number, the names of its parameters and the indices of its layers with an auxiliary loss."""
    losses = [layer.index for layer in cell.layers if hasattr(layer.module, "auxiliary_loss")]
    return cell.number, [name for name, _ in cell.parameters()], losses


def make_transport(world: World, placement: Sequence[int]) -> Transport | None:
    """Returns the transport between this replica's workers; None where all cells live on one worker.

    Args:
        placement: worker of each cell.
    """
    if world.workers == 1 or world.message_groups is None or world.all_ranks is None:
        return None
    ranks = tuple(world.rank_of(worker) for worker in placement)
    shares_memory = world.wire.type != GPU and isinstance(world.all_ranks, LocalGroup)
    kind = SharedMemoryTransport if shares_memory else Transport
    return kind(ranks, world.device, world.wire, world.message_groups, world.all_ranks)
