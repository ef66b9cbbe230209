"""Runs the engine: one worker's interpreter of its list of instructions (paper, sections 2.2 and 2.3).

One training step of K=3 cells on three workers with M=3 micro-batches. Time runs to the right; F forward, R recompute,
B backward; the digit is the micro-batch (gpipe, remat except_last, as `schedule/picture.py` prints it):

    worker 0 | F0 F1 F2  .  .  .  . B2 R1 B1 R0 B0     [1] F keeps only the input of its cell and no graph
    worker 1 |  . F0 F1 F2  .  . B2 R1 B1 R0 B0  .     [2] unless no R follows, as for F2: then it keeps its graph
    worker 2 |  .  . F0 F1 F2 B2 R1 B1 R0 B0  .  .     [3] R builds the graph again, before the gradient arrives
                                                       [4] B uses graph and input up; the input's gradient goes back

`Engine` lives as long as the run. Every step gets an interpreter of its own, `_TrainingStep` or `_ForwardStep`, with
`StepBuffers` of its own: what a step holds ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..micro_batch import Loss, MicroBatch, Tensors
from ..position import Position
from ..schedule.instruction import Instruction, Op
from ..schedule.posting import Posts, Receives, post_ahead
from .cell import Cell, LayerFailed
from .halves import WeightHalf, backward_of_inputs
from .messages.boundary import BoundarySpec, canonical_gradient, fresh_leaves, is_channels_last
from .messages.grouping import grouped, grouped_like, grouping_of
from .messages.process_group import Wait
from .messages.transport import Transport
from .meter import Meter

TASK = -1  # stands for the task's loss where auxiliary losses have the index of their layer

Sink = Callable[[int, Tensors, Tensors], None]
Caches = dict[tuple[int, int], list[dict[str, Any]]]
Handlers = Mapping[Op, Callable[..., None]]  # called with the step and the instruction


@dataclass(frozen=True)
class StepInput:
    """Describes a mini-batch: what every worker of a replica must know before the step begins.

    Attributes:
        step: number of the training step; the noise depends on it.
        steps: of the whole run, for layers with a schedule of their own.
        signatures: one for each micro-batch; two are equal exactly when all input shapes are equal.
        scale: 1 / weight of the whole mini-batch, over all replicas; times a factor of all gradients.
    """

    step: int
    steps: int
    signatures: tuple[Hashable, ...]
    scale: float


@dataclass
class StepRecord:
    """Holds the results of a training step on one worker.

    Attributes:
        losses: unscaled sums by (layer, micro-batch): auxiliary losses under the index of their layer, the task's under
            `TASK`. One number each, so that adding them up gives the same bits for every K.
        statistics: sums of the task's statistics, on the last cell's worker.
    """

    losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    statistics: Tensor | None = None


@dataclass
class Graph:
    """Holds what a backward starts from: the outputs of a cell for one micro-batch, and its losses."""

    outputs: Tensors
    losses: list[Tensor]


@dataclass
class StepBuffers:
    """Holds what one step has made or received and not yet used up, by (cell, micro-batch).

    Attributes:
        inputs: the boundary in front of the cell.
        outputs: the boundary behind it, until it is sent.
        graphs: from forward or recompute to backward.
        weight_halves: second halves of backwards.
        input_gradients: of the boundary in front of the cell.
        output_gradients: of the boundary behind it, received.
        targets: by micro-batch, until the step ends.
    """

    inputs: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    weight_halves: dict[tuple[int, int], WeightHalf] = field(default_factory=dict)
    input_gradients: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    output_gradients: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    targets: dict[int, Tensors] = field(default_factory=dict)

    def left_over(self) -> list[str]:
        """Returns the names of the buffers that a complete step would have emptied."""
        return [name for name, held in vars(self).items() if held and name != "targets"]


class Engine:
    """Runs one worker's share of a replica's pipeline.

    Args:
        cells: of this worker, in order.
        placement: worker of every cell.
        transport: to the other workers; None when there are none.
        loss: (outputs, targets) of the last cell to (sum, statistics); it may raise ConfigurationError.
        targets: how many of the tensors of a message are targets.
        device: of this worker.
        autocast: makes the context in which forward runs.
        where: kept up to date with what runs, for error reports.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        placement: Sequence[int],
        transport: Transport | None,
        loss: Loss,
        targets: int,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        where: Position | None = None,
    ) -> None:
        self.cells = {cell.number: cell for cell in cells}
        self.placement, self.last = tuple(placement), len(placement) - 1
        self.loss, self.n_targets, self.device, self.autocast = loss, targets, device, autocast
        self.where = Position() if where is None else where
        for cell in cells:
            cell.where = self.where
        self.meter = Meter(device)
        self._transport = transport
        # Shapes that occurred, by (cell in front of the boundary, signature of the micro-batch):
        self.boundaries: dict[tuple[int, Hashable], BoundarySpec] = {}  # what a cell of this worker puts out
        self.messages: dict[tuple[int, Hashable], BoundarySpec] = {}  # what is sent or received: with the targets

    @property
    def transport(self) -> Transport:
        """Returns the transport; only for instructions that send or receive."""
        assert self._transport is not None
        return self._transport

    def train_step(
        self,
        instructions: Sequence[Instruction],
        step_input: StepInput,
        micro_batches: Sequence[MicroBatch] | None,
        posts: Posts | None = None,
        timed: bool = True,
        after: Mapping[int, Callable[[], None]] | None = None,
    ) -> StepRecord:
        """Runs forward and backward of one mini-batch and adds the gradients to the parameters' ``.grad``.

        Args:
            instructions: this worker's list of the schedule.
            step_input: describes the mini-batch.
            micro_batches: of the mini-batch, on the worker of cell 0; None elsewhere.
            posts: when receives are posted; None: `post_ahead`.
            timed: the engine's meter records every instruction.
            after: called when the instruction at that position of the list has run.

        Raises:
            LayerFailed: an exception in a layer, with the layer's own as cause.
        """
        for cell in self.cells.values():
            cell.begin_step(step_input.step, step_input.steps)
        step = _TrainingStep(
            self, instructions, step_input.signatures, micro_batches, posts, step_input.step, step_input.scale
        )
        step.run(self.meter if timed else None, after or {})
        for cell in self.cells.values():
            cell.end_step()
        return step.record

    def run_forward(
        self,
        instructions: Sequence[Instruction],
        signatures: Sequence[Hashable],
        micro_batches: Sequence[MicroBatch] | None,
        sink: Sink,
        caches: Caches | None = None,
        posts: Posts | None = None,
    ) -> None:
        """Runs forward only, without noise or graph, for evaluation and generation.

        Args:
            instructions: this worker's list of a forward-only schedule.
            signatures: as in `StepInput`; distinct from those of training.
            micro_batches: on the worker of cell 0.
            sink: called on the worker of the last cell with (micro-batch, outputs, targets).
            caches: of generation, by (cell, micro-batch); they live as long as the caller keeps them.
            posts: as in `train_step`.
        """
        with torch.no_grad():
            _ForwardStep(self, instructions, signatures, micro_batches, posts, sink, caches).run(None, {})

    @property
    def receives_block_device(self) -> bool:
        """Returns whether receives must be posted by `post_when_sent`."""
        return self._transport is not None and self._transport.blocks_device

    def drain(self) -> None:
        """Waits until every message of this worker has left."""
        if self._transport is not None:
            self._transport.drain()

    def post_receive(self, signatures: Sequence[Hashable], instruction: Instruction) -> Wait | None:
        """Posts the receive of an instruction; None when its shapes are not known yet.

        Where receives are posted when they are sent, an unknown shape is waited for: its description was sent too.
        """
        message = instruction.awaited_message
        assert message is not None
        key, is_activation = (message.boundary, signatures[message.micro_batch]), message.direction == "activation"
        spec = (self.messages if is_activation else self.boundaries).get(key)
        if spec is None and is_activation and self.transport.blocks_device:
            spec = self.messages[key] = self.transport.receive_spec(message.boundary)
        if spec is None:
            return None
        return self.transport.post(message, spec if is_activation else spec.gradients)


@dataclass
class _Step:
    """Interprets the instruction list of one step: what training and forward-only steps share.

    Args:
        pipeline: of this worker.
        instructions: of this worker.
        signatures: of the micro-batches.
        micro_batches: on the worker of cell 0.
        posts: when receives are posted; None: `post_ahead`.
    """

    HANDLERS: ClassVar[Handlers]

    pipeline: Engine
    instructions: Sequence[Instruction]
    signatures: Sequence[Hashable]
    micro_batches: InitVar[Sequence[MicroBatch] | None]
    posts: InitVar[Posts | None]
    buffers: StepBuffers = field(default_factory=StepBuffers, init=False)

    def __post_init__(self, micro_batches: Sequence[MicroBatch] | None, posts: Posts | None) -> None:
        for number, (inputs, targets) in enumerate(micro_batches or ()):
            self.buffers.inputs[0, number] = self._to_device(inputs)
            self.buffers.targets[number] = self._to_device(targets)
        post = partial(self.pipeline.post_receive, self.signatures)
        self._receives = Receives(post_ahead(self.instructions) if posts is None else posts, post)

    def run(self, meter: Meter | None, after: Mapping[int, Callable[[], None]]) -> None:
        """Executes the list, with a time for every instruction where there is a meter; ``after`` as in `train_step`."""
        where, handlers = self.pipeline.where, self.HANDLERS
        outside = where.instruction
        for position, instruction in enumerate(self.instructions):
            self._receives.post_due(position)
            op = instruction.op
            where.enter(instruction.cell, instruction.micro_batch, op.name.lower())
            started = None if meter is None else meter.mark()
            handlers[op](self, instruction)
            if meter is not None and started is not None:
                meter.record(instruction, started)
            if position in after:
                after[position]()
        where.enter(None, None, outside)  # later errors belong to no instruction
        self.pipeline.drain()
        left_over = self.buffers.left_over() + (["receives"] if self._receives else [])
        if left_over:
            raise RuntimeError(f"the schedule is incomplete: the step has not used up {', '.join(left_over)}")

    def _to_device(self, tensors: Iterable[Tensor]) -> Tensors:
        return tuple(tensor.to(self.pipeline.device, non_blocking=True) for tensor in tensors)

    def _is_local(self, cell: int) -> bool:
        """Returns whether the boundary behind the cell lies inside this worker."""
        placement = self.pipeline.placement
        return placement[cell] == placement[cell + 1]

    def _pass_on(self, i: Instruction, outputs: Tensors) -> None:
        """Gives a cell's outputs to the next cell: at once inside a worker, else with the send that follows."""
        key = i.cell, self.signatures[i.micro_batch]
        spec = self.pipeline.boundaries.get(key)
        if spec is None:
            spec = self.pipeline.boundaries[key] = BoundarySpec.of(outputs)
        if self._is_local(i.cell):
            self.buffers.inputs[i.cell + 1, i.micro_batch] = fresh_leaves(outputs, spec)
        else:
            self.buffers.outputs[i.cell, i.micro_batch] = grouped_like((tensor.detach() for tensor in outputs), outputs)

    def _send_activation(self, i: Instruction) -> None:
        """Sends activations and, behind them, the micro-batch's targets, which travel on to the last cell."""
        pipeline, key = self.pipeline, (i.cell, self.signatures[i.micro_batch])
        targets = self.buffers.targets[i.micro_batch]
        spec = pipeline.messages.get(key)
        if spec is None:
            spec = pipeline.messages[key] = pipeline.boundaries[key].followed_by(targets)
            pipeline.transport.send_spec(i.cell, spec)
        outputs = self.buffers.outputs.pop((i.cell, i.micro_batch))
        tensors = grouped(outputs + targets, grouping_of(outputs))
        pipeline.cells[i.cell].refuse_new_shapes(tensors, spec, i.micro_batch)
        self._send(i, tensors, spec)

    def _send(self, i: Instruction, tensors: Tensors, spec: BoundarySpec) -> None:
        assert i.sent_message is not None
        self.pipeline.transport.send(i.sent_message, tensors, spec)

    def _receive_activation(self, i: Instruction) -> None:
        pipeline, key = self.pipeline, (i.cell - 1, self.signatures[i.micro_batch])
        if key not in pipeline.messages:
            pipeline.messages[key] = pipeline.transport.receive_spec(i.cell - 1)
        tensors = self._receive(i, separate=pipeline.n_targets)  # targets stay until the step ends
        split = len(tensors) - pipeline.n_targets
        spec = pipeline.messages[key]
        for tensor, described in zip(tensors[:split], spec.tensors, strict=False):
            if described.needs_gradient:  # it collects the gradient that will be sent back
                tensor.requires_grad_()
        self.buffers.inputs[i.cell, i.micro_batch] = grouped(tensors[:split], spec.grouping)
        self.buffers.targets[i.micro_batch] = tensors[split:]

    def _receive(self, i: Instruction, separate: int = 0) -> Tensors:
        wait = self._receives.take(i) or self.pipeline.post_receive(self.signatures, i)
        assert wait is not None  # its shapes are known by now
        return wait(separate)


@dataclass
class _ForwardStep(_Step):
    """Interprets a forward-only list; ``sink`` and ``caches`` as in `Engine.run_forward`."""

    sink: Sink
    caches: Caches | None

    def _forward(self, i: Instruction) -> None:
        place, cell = (i.cell, i.micro_batch), self.pipeline.cells[i.cell]
        caches = None if self.caches is None else self.caches.setdefault(place, [{} for _ in cell.layers])
        with self.pipeline.autocast():
            outputs = cell.run_inference(self.buffers.inputs.pop(place), i.micro_batch, caches)
        if i.cell == self.pipeline.last:
            self.pipeline.where.enter(i.cell, i.micro_batch, "scoring the outputs")
            self.sink(i.micro_batch, outputs, self.buffers.targets[i.micro_batch])
        else:
            self._pass_on(i, outputs)

    HANDLERS: ClassVar[Handlers] = {
        Op.FORWARD: _forward,
        Op.SEND_ACTIVATION: _Step._send_activation,
        Op.RECEIVE_ACTIVATION: _Step._receive_activation,
    }


@dataclass
class _TrainingStep(_Step):
    """Interprets a training list.

    Attributes:
        record: the results of the step.
    """

    step: int
    scale: float
    record: StepRecord = field(default_factory=StepRecord, init=False)

    def __post_init__(self, micro_batches: Sequence[MicroBatch] | None, posts: Posts | None) -> None:
        super().__post_init__(micro_batches, posts)
        self._recomputed = {(i.cell, i.micro_batch) for i in self.instructions if i.op is Op.RECOMPUTE}

    def _forward(self, i: Instruction) -> None:
        keeps_graph = (i.cell, i.micro_batch) not in self._recomputed
        is_last = i.cell == self.pipeline.last
        is_known = is_last or (i.cell, self.signatures[i.micro_batch]) in self.pipeline.boundaries
        # Only a graph shows which outputs need a gradient, so the first run with new shapes builds one.
        if keeps_graph or not is_known:
            outputs = self._run_with_graph(i, first_time=True, counts=keeps_graph)  # [2]
        else:
            with torch.no_grad(), self.pipeline.autocast():
                outputs, _ = self._run(i, first_time=True)  # [1]
        if not is_last:
            self._pass_on(i, outputs)

    def _recompute(self, i: Instruction) -> None:
        self._run_with_graph(i, first_time=False, counts=True)  # [3]

    def _run_with_graph(self, i: Instruction, first_time: bool, counts: bool) -> Tensors:
        """Runs F_k and returns its outputs.

        Args:
            counts: this is the run that backward will use: its graph is kept and its losses are recorded.
        """
        is_last = i.cell == self.pipeline.last
        with torch.enable_grad(), self.pipeline.autocast():
            outputs, losses = self._run(i, first_time)
            if is_last and counts:
                losses[TASK] = self._score(outputs, i.micro_batch)
        if counts:
            self.record.losses |= {(layer, i.micro_batch): loss.detach().clone() for layer, loss in losses.items()}
            # The last cell's outputs (logits) are not needed once the loss is known; its graph keeps what it needs.
            self.buffers.graphs[i.cell, i.micro_batch] = Graph(() if is_last else outputs, list(losses.values()))
        return outputs

    def _run(self, i: Instruction, first_time: bool) -> tuple[Tensors, dict[int, Tensor]]:
        cell = self.pipeline.cells[i.cell]
        with cell.weights_cast(self.pipeline.device):
            return cell.run_training(
                self.buffers.inputs[i.cell, i.micro_batch],
                self.buffers.targets[i.micro_batch],
                self.step,
                i.micro_batch,
                self.signatures[i.micro_batch],
                first_time,
            )

    def _score(self, outputs: Tensors, micro_batch: int) -> Tensor:
        self.pipeline.where.enter(self.pipeline.last, micro_batch, "the task's loss")
        try:
            loss, statistics = self.pipeline.loss(outputs, self.buffers.targets[micro_batch])
        except ConfigurationError:
            raise
        except Exception as error:
            raise LayerFailed(f"cell {self.pipeline.last}, the task's loss, micro-batch {micro_batch}") from error
        seen = self.record.statistics
        self.record.statistics = statistics if seen is None else seen + statistics
        return loss

    def _backward(self, i: Instruction) -> None:
        """Runs B_k, or with INPUT_GRADIENT its first half."""
        place = i.cell, i.micro_batch
        graph, inputs = self.buffers.graphs.pop(place), self.buffers.inputs.pop(place)  # [4]
        arrived = iter(self._take_output_gradients(i))
        roots = [(tensor, next(arrived)) for tensor in graph.outputs if tensor.requires_grad]
        roots += [(loss, torch.full_like(loss, self.scale)) for loss in graph.losses if loss.requires_grad]
        outputs, gradients = [root for root, _ in roots], [gradient for _, gradient in roots]
        with self.pipeline.cells[i.cell].going_backward(i.micro_batch):
            if i.op is Op.INPUT_GRADIENT:
                self.buffers.weight_halves[place] = backward_of_inputs(outputs, gradients, inputs)
            elif roots:
                torch.autograd.backward(outputs, gradients)
        if i.cell > 0:
            self.buffers.input_gradients[place] = tuple(
                torch.zeros_like(tensor)
                if tensor.grad is None
                else canonical_gradient(tensor.grad, is_channels_last(tensor))
                for tensor in inputs
                if tensor.requires_grad
            )

    def _weight_gradient(self, i: Instruction) -> None:
        with self.pipeline.cells[i.cell].going_backward(i.micro_batch):
            self.buffers.weight_halves.pop((i.cell, i.micro_batch)).run()

    def _take_output_gradients(self, i: Instruction) -> Tensors:
        if i.cell == self.pipeline.last:
            return ()
        if self._is_local(i.cell):
            return self.buffers.input_gradients.pop((i.cell + 1, i.micro_batch))
        return self.buffers.output_gradients.pop((i.cell, i.micro_batch))

    def _send_gradient(self, i: Instruction) -> None:
        spec = self.pipeline.messages[i.cell - 1, self.signatures[i.micro_batch]]  # the activation's, on its way here
        self._send(i, self.buffers.input_gradients.pop((i.cell, i.micro_batch)), spec.gradients)

    def _receive_gradient(self, i: Instruction) -> None:
        self.buffers.output_gradients[i.cell, i.micro_batch] = self._receive(i)

    HANDLERS: ClassVar[Handlers] = {
        Op.FORWARD: _forward,
        Op.RECOMPUTE: _recompute,
        Op.BACKWARD: _backward,
        Op.INPUT_GRADIENT: _backward,
        Op.WEIGHT_GRADIENT: _weight_gradient,
        Op.SEND_ACTIVATION: _Step._send_activation,
        Op.RECEIVE_ACTIVATION: _Step._receive_activation,
        Op.SEND_GRADIENT: _send_gradient,
        Op.RECEIVE_GRADIENT: _receive_gradient,
    }
