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

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..micro_batch import Loss, MicroBatch, Tensors
from ..position import Position
from ..schedule.instruction import COMPUTE, Instruction, Op
from ..schedule.posting import Posts, Receives, post_ahead
from .cell import Cell, failed
from .halves import WeightHalf, backward_of_inputs
from .messages.boundary import BoundarySpec, canonical_gradient, fresh_leaves, is_channels_last
from .messages.grouping import grouped, grouping_of
from .messages.process_group import Wait
from .messages.transport import Transport
from .meter import Meter

TASK = -1  # stands for the task's loss where auxiliary losses have the index of their layer

Sink = Callable[[int, Tensors, Tensors], None]
Caches = dict[tuple[int, int], list[dict[str, Any]]]  # of generation, by (cell, micro-batch): one dict a layer
Handlers = Mapping[Op, Callable[..., None]]  # called with the step and the instruction
Gradients = Sequence[Tensor | None]
Graph = tuple[Tensors, list[Tensor]]  # the roots of a backward: outputs of a cell for one micro-batch, and its losses


class SenderFailed(RuntimeError):
    """Raised where a worker gets nothing, since the one before it has failed."""


@dataclass(frozen=True)
class StepInput:
    """Describes a mini-batch, as every worker of a replica must know it before the step begins.

    Attributes:
        step: number of the training step; the noise depends on it.
        steps: of the whole run, for layers with a schedule of their own.
        signatures: one for each micro-batch; two are equal exactly when all input shapes are equal.
        scale: 1 / weight of the whole mini-batch, over all replicas; times a factor of all gradients.
        empty: micro-batches of weight 0: whatever their loss is, such as the mean of no numbers, it does not count.
    """

    step: int
    steps: int
    signatures: tuple[Hashable, ...]
    scale: float
    empty: frozenset[int] = frozenset()


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
class StepBuffers:
    """Holds the tensors that one step has made or received and not yet used up, by (cell, micro-batch).

    Attributes:
        inputs: the boundary in front of the cell.
        outputs: the boundary behind it, until it is sent; those require a gradient that take one.
        graphs: from forward or recompute to backward.
        weight_halves: second halves of backwards.
        input_gradients: of the boundary in front of the cell, for each of its `takers`; None where nothing flowed back.
        output_gradients: of the boundary behind it, received, likewise.
        targets: by micro-batch, until the step ends.
    """

    inputs: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    weight_halves: dict[tuple[int, int], WeightHalf] = field(default_factory=dict)
    input_gradients: dict[tuple[int, int], Gradients] = field(default_factory=dict)
    output_gradients: dict[tuple[int, int], Gradients] = field(default_factory=dict)
    targets: dict[int, Tensors] = field(default_factory=dict)


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

    Attributes:
        running: the instruction whose layers run, for hooks on them.
    """

    running: Instruction

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
        self.noise, self.meter = cells[0].noise, Meter(device)
        self._transport = transport
        self.receives_block_device = transport is not None and transport.blocks_device  # posted by `post_early`
        self.failed_at = 0.0  # `time.time()` of the latest failure
        # Called where no message is on its way, if a worker that fails gives the others what they await of the step:
        self.at_rest: Callable[[], None] | None = None
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
    ) -> StepRecord:
        """Runs forward and backward of one mini-batch and adds the gradients to the parameters' ``.grad``.

        Args:
            instructions: this worker's list of the schedule.
            step_input: describes the mini-batch.
            micro_batches: of the mini-batch, on the worker of cell 0; None elsewhere.
            posts: when receives are posted; None: `post_ahead`.
            timed: the engine's meter records every instruction.

        Raises:
            LayerFailed: an exception in a layer, with the layer's own as cause.
        """
        with self.noise.restored():
            step = _TrainingStep(self, instructions, step_input.signatures, micro_batches, posts, step_input)
            step.run(self.meter if timed else None)
        for cell in self.cells.values():
            cell.end_step()
        return step.record

    def describe_anew(self) -> None:
        """Forgets which tensors pass between cells; all workers call it at the same time, between two steps."""
        self.boundaries.clear()
        self.messages.clear()

    def run_forward(
        self,
        instructions: Sequence[Instruction],
        signatures: Sequence[Hashable],
        micro_batches: Sequence[MicroBatch] | None,
        sink: Sink,
        caches: Caches | None = None,
        posts: Posts | None = None,
        number: Sequence[int] = (0, 0),
    ) -> None:
        """Runs forward only, without a graph, for evaluation and generation.

        Args:
            instructions: this worker's list of a forward-only schedule.
            signatures: as in `StepInput`; distinct from those of training.
            micro_batches: on the worker of cell 0.
            sink: called on the worker of the last cell with (micro-batch, outputs, targets).
            caches: of generation, by (cell, micro-batch); they live as long as the caller keeps them.
            posts: as in `train_step`.
            number: steps, and forwards since then; the noise of layers that draw it in evaluation depends on it.
        """
        with torch.no_grad(), self.noise.restored():
            _ForwardStep(self, instructions, signatures, micro_batches, posts, sink, caches, number).run(None)

    def forget_failure(self) -> None:
        """Forgets a step that has failed, with the shapes that it told; all workers call it at the same time."""
        self.describe_anew()
        self.where.leave()
        for cell in self.cells.values():
            cell.end_step()
            for batchnorm in cell.batchnorms:
                batchnorm.take_gathered()

    def drain(self) -> None:
        """Waits until every message of this worker has left."""
        if self._transport is not None:
            self._transport.drain()

    def post_receive(self, signatures: Sequence[Hashable], instruction: Instruction) -> Wait | None:
        """Posts the receive of an instruction; None when its shapes are not known yet.

        With NCCL the send has begun, and the description of an unknown shape too: this waits for it.
        """
        message = instruction.awaited_message
        assert message is not None
        key, is_activation = (message.boundary, signatures[message.micro_batch]), message.direction == "activation"
        spec = (self.messages if is_activation else self.boundaries).get(key)
        if spec is None and is_activation and self.receives_block_device:
            spec = self.messages[key] = self.transport.receive_spec(message.boundary)
        if spec is None:
            return None
        return self.transport.post(message, spec if is_activation else spec.gradients)


def _named_in_profile(i: Instruction) -> AbstractContextManager[Any]:
    """Returns the context in which a profiler that records shows a name; without one it costs less than 1 µs."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"{i.op.name.lower()}, cell {i.cell}, micro-batch {i.micro_batch}")


@dataclass
class _Step:
    """Interprets the instruction list of one step, in the part that training and forward-only steps share.

    Args:
        engine: of this worker.
        instructions: of this worker.
        signatures: of the micro-batches.
        micro_batches: on the worker of cell 0.
        posts: when receives are posted; None: `post_ahead`.
    """

    HANDLERS: ClassVar[Handlers]

    engine: Engine
    instructions: Sequence[Instruction]
    signatures: Sequence[Hashable]
    micro_batches: InitVar[Sequence[MicroBatch] | None]
    posts: InitVar[Posts | None]
    buffers: StepBuffers = field(default_factory=StepBuffers, init=False)

    def __post_init__(self, micro_batches: Sequence[MicroBatch] | None, posts: Posts | None) -> None:
        for number, (inputs, targets) in enumerate(micro_batches or ()):
            self.buffers.inputs[0, number] = self._to_device(inputs)
            self.buffers.targets[number] = self._to_device(targets)
        post = partial(self.engine.post_receive, self.signatures)
        self._receives = Receives(post_ahead(self.instructions) if posts is None else posts, post)

    def run(self, meter: Meter | None) -> None:
        """Executes the list, with a time for every instruction where there is a meter."""
        where, handlers = self.engine.where, self.HANDLERS
        position, op = -1, Op.FORWARD
        try:
            self._begin()
            for position, instruction in enumerate(self.instructions):
                op, self.engine.running = instruction.op, instruction
                self._receives.post_due(position)
                where.enter(instruction.cell, instruction.micro_batch, op.name.lower())
                started = None if meter is None else meter.mark()
                with _named_in_profile(instruction):
                    handlers[op](self, instruction)
                if self.engine.at_rest is not None and op in COMPUTE:
                    self.engine.at_rest()
                if meter is not None and started is not None:
                    meter.record(instruction, started)
        except BaseException as error:
            self.engine.failed_at = time.time()
            sends = op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)  # and has not sent
            if self.engine.at_rest is not None and (op in COMPUTE or sends or isinstance(error, SenderFailed)):
                self._send_nothing(position + (not sends))
            raise
        where.leave()
        self.engine.drain()
        if self.engine.at_rest is not None:
            self.engine.at_rest()

    def _begin(self) -> None:
        """Makes the step's inputs, seeds and receives ready, before the first instruction."""

    def _send_nothing(self, position: int) -> None:
        """Sends zeros from this position of the list on, and receives: the other workers go on to the step's end.

        A message whose shapes they do not know yet is described as empty; who receives that fails, too.
        """
        engine, nothing = self.engine, BoundarySpec(())
        self.buffers = StepBuffers()
        for place, i in enumerate(self.instructions[position:], position):
            self._receives.post_due(place)
            key = i.cell, self.signatures[i.micro_batch]
            if i.op is Op.RECEIVE_ACTIVATION:
                self._description_of_inputs(i)
            elif i.op is Op.SEND_ACTIVATION and key not in engine.messages:
                engine.boundaries[key] = engine.messages[key] = nothing
                engine.transport.send_spec(i.cell, nothing)
            elif i.op is Op.RECEIVE_GRADIENT:
                engine.boundaries.setdefault(key, nothing)
            if i.awaited_message is not None:
                self._receive(i)
            if i.sent_message is not None:
                of = engine.messages[i.sent_message.boundary, key[1]]
                spec = of if i.op is Op.SEND_ACTIVATION else of.gradients
                zeros = (torch.zeros(one.shape, dtype=one.dtype, device=engine.device) for one in spec.tensors)
                self._send(i, grouped(zeros, spec.grouping), spec)
        engine.drain()

    def _description_of_inputs(self, i: Instruction) -> BoundarySpec:
        """Returns the description of the activations that the instruction receives, with the targets."""
        messages, key = self.engine.messages, (i.cell - 1, self.signatures[i.micro_batch])
        if key not in messages:
            messages[key] = self.engine.transport.receive_spec(i.cell - 1)
        return messages[key]

    def _to_device(self, tensors: Iterable[Tensor]) -> Tensors:
        return tuple(tensor.to(self.engine.device, non_blocking=True) for tensor in tensors)

    def _is_local(self, cell: int) -> bool:
        """Returns whether the boundary behind the cell lies inside this worker."""
        placement = self.engine.placement
        return placement[cell] == placement[cell + 1]

    def _pass_on(self, i: Instruction, outputs: Tensors, takers: Collection[int] = ()) -> None:
        """Gives a cell's outputs to the next cell: at once inside a worker, else with the send that follows.

        Args:
            takers: indices of the outputs that take a gradient in this micro-batch.
        """
        if self._is_local(i.cell):
            self.buffers.inputs[i.cell + 1, i.micro_batch] = fresh_leaves(outputs, takers)
        else:
            self.buffers.outputs[i.cell, i.micro_batch] = fresh_leaves(outputs, takers)

    def _send_activation(self, i: Instruction) -> None:
        """Sends activations and, behind them, the micro-batch's targets, which travel on to the last cell."""
        engine, key = self.engine, (i.cell, self.signatures[i.micro_batch])
        targets = self.buffers.targets[i.micro_batch]
        spec = engine.messages.get(key)
        if spec is None:
            spec = engine.messages[key] = engine.boundaries[key].followed_by(targets)
            engine.transport.send_spec(i.cell, spec)
        outputs = self.buffers.outputs.pop((i.cell, i.micro_batch))
        flags = (_flags([outputs[number].requires_grad for number in spec.takers]),) if spec.varies else ()
        tensors = grouped(outputs + flags + targets, grouping_of(outputs))
        engine.cells[i.cell].refuse_new_shapes(tensors, spec, i.micro_batch)
        self._send(i, tensors, spec)

    def _send(self, i: Instruction, tensors: Tensors, spec: BoundarySpec) -> None:
        assert i.sent_message is not None
        self.engine.transport.send(i.sent_message, tensors, spec)

    def _receive_activation(self, i: Instruction) -> None:
        engine, spec = self.engine, self._description_of_inputs(i)
        tensors = self._receive(i, separate=engine.n_targets)  # targets stay until the step ends
        if not tensors:
            raise SenderFailed("the worker of the cell before has failed")
        split = len(tensors) - engine.n_targets
        flags = [True] * len(spec.takers) if spec.flags is None else tensors[spec.flags].tolist()
        for number, takes in zip(spec.takers, flags, strict=True):
            tensors[number].requires_grad_(bool(takes))  # it collects the gradient that will be sent back
        self.buffers.inputs[i.cell, i.micro_batch] = grouped(tensors[: split - spec.varies], spec.grouping)
        self.buffers.targets[i.micro_batch] = tensors[split:]

    def _receive(self, i: Instruction, separate: int = 0) -> Tensors:
        wait = self._receives.take(i) or self.engine.post_receive(self.signatures, i)
        assert wait is not None  # its shapes are known by now
        return wait(separate)


@dataclass
class _ForwardStep(_Step):
    """Interprets a forward-only list; ``sink``, ``caches`` and ``number`` as in `Engine.run_forward`."""

    sink: Sink
    caches: Caches | None
    number: Sequence[int]

    def _forward(self, i: Instruction) -> None:
        place, cell = (i.cell, i.micro_batch), self.engine.cells[i.cell]
        caches = None if self.caches is None else self.caches.setdefault(place, [{} for _ in cell.layers])
        with self.engine.autocast():
            outputs = cell.run_inference(self.buffers.inputs.pop(place), self.number, i.micro_batch, caches)
        if i.cell == self.engine.last:
            self.engine.where.enter(i.cell, i.micro_batch, "scoring the outputs")
            self.sink(i.micro_batch, outputs, self.buffers.targets[i.micro_batch])
        else:
            key = i.cell, self.signatures[i.micro_batch]
            if key not in self.engine.boundaries:
                self.engine.boundaries[key] = BoundarySpec.of(outputs)
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

    given: StepInput
    record: StepRecord = field(default_factory=StepRecord, init=False)

    def __post_init__(self, micro_batches: Sequence[MicroBatch] | None, posts: Posts | None) -> None:
        super().__post_init__(micro_batches, posts)
        self._waits: dict[int, dict[int, bool]] = {}  # by cell: see `backward_of_inputs`
        self._recomputed = {(i.cell, i.micro_batch) for i in self.instructions if i.op is Op.RECOMPUTE}

    def _begin(self) -> None:
        for cell in self.engine.cells.values():
            cell.begin_step(self.given.step, self.given.steps)

    def _forward(self, i: Instruction) -> None:
        keeps_graph = (i.cell, i.micro_batch) not in self._recomputed
        is_last, key = i.cell == self.engine.last, (i.cell, self.signatures[i.micro_batch])
        spec = self.engine.boundaries.get(key)
        # Only a graph shows which outputs take a gradient: the first run with new shapes builds one, and every run
        # where it varies.
        if keeps_graph or not (is_last or (spec is not None and not spec.varies)):
            outputs = self._run_with_graph(i, first_time=True, counts=keeps_graph)  # [2]
            if not is_last:
                spec = self.engine.boundaries[key]
                self._pass_on(i, outputs, [number for number in spec.takers if outputs[number].requires_grad])
        else:
            with torch.no_grad(), self.engine.autocast():
                outputs, _ = self._run(i, first_time=True, counts=False)  # [1]
            if spec is not None:
                self._pass_on(i, outputs, spec.takers)

    def _recompute(self, i: Instruction) -> None:
        self._run_with_graph(i, first_time=False, counts=True)  # [3]

    def _run_with_graph(self, i: Instruction, first_time: bool, counts: bool) -> Tensors:
        """Runs F_k and returns its outputs.

        Args:
            counts: this is the run that backward will use: its graph is kept and its losses are recorded.
        """
        is_last = i.cell == self.engine.last
        with torch.enable_grad(), self.engine.autocast():
            outputs, losses = self._run(i, first_time, counts)
            if is_last and counts:
                losses[TASK] = self._score(outputs, i.micro_batch)
        if not is_last:
            self._look_for_takers(i, outputs)
        if counts:
            self.record.losses |= {(layer, i.micro_batch): loss.detach().clone() for layer, loss in losses.items()}
            # The last cell's outputs (logits) are not needed once the loss is known; its graph keeps what it needs.
            self.buffers.graphs[i.cell, i.micro_batch] = () if is_last else outputs, list(losses.values())
        return outputs

    def _look_for_takers(self, i: Instruction, outputs: Tensors) -> None:
        """Describes the boundary behind the cell at its first run; later no further output may take a gradient.

        Unless the cell's graph is fixed, any output may take one later, as after a dropped modality, if the cell or
        what comes before it is trained.
        """
        cell, key = self.engine.cells[i.cell], (i.cell, self.signatures[i.micro_batch])
        if (spec := self.engine.boundaries.get(key)) is not None:
            cell.refuse_new_takers(outputs, spec.takers, i.micro_batch)
            return
        any_may = cell.graph_varies and (cell.is_trained or bool(self._takers_in_front(i)))
        takers = [
            number
            for number, tensor in enumerate(outputs)
            if tensor.requires_grad or (any_may and (tensor.is_floating_point() or tensor.is_complex()))
        ]
        self.engine.boundaries[key] = BoundarySpec.of(outputs).with_takers(takers)

    def _takers_in_front(self, i: Instruction) -> tuple[int, ...]:
        """Returns the indices of the cell's inputs that may take a gradient."""
        if i.cell == 0:
            return ()
        key = i.cell - 1, self.signatures[i.micro_batch]
        return (self.engine.boundaries if self._is_local(i.cell - 1) else self.engine.messages)[key].takers

    def _run(self, i: Instruction, first_time: bool, counts: bool) -> tuple[Tensors, dict[int, Tensor]]:
        cell, number = self.engine.cells[i.cell], i.micro_batch
        inputs, targets = self.buffers.inputs[i.cell, number], self.buffers.targets[number]
        if not counts:  # hooks that layers put on their inputs must not be there twice
            inputs = fresh_leaves(inputs, [n for n, tensor in enumerate(inputs) if tensor.requires_grad])
        with cell.weights_cast(self.engine.device):
            return cell.run_training(inputs, targets, self.given.step, number, self.signatures[number], first_time)

    def _score(self, outputs: Tensors, micro_batch: int) -> Tensor:
        self.engine.where.enter(self.engine.last, micro_batch, "the task's loss")
        try:
            loss, statistics = self.engine.loss(outputs, self.buffers.targets[micro_batch])
        except ConfigurationError:
            raise
        except Exception as error:
            text = f"cell {self.engine.last}, the task's loss, micro-batch {micro_batch}"
            raise failed(text, type(error)) from error
        noise, seen = self.engine.noise, self.record.statistics
        noise.seed_backward(noise.seeds(self.given.step, micro_batch, [TASK])[0], [loss])
        self.record.statistics = statistics if seen is None else seen + statistics
        return torch.zeros_like(loss) if micro_batch in self.given.empty else loss

    def _backward(self, i: Instruction) -> None:
        """Runs B_k, or with INPUT_GRADIENT its first half."""
        place = i.cell, i.micro_batch
        (made, losses), inputs = self.buffers.graphs.pop(place), self.buffers.inputs.pop(place)  # [4]
        arrived = self._take_output_gradients(i)
        roots = [(made[n], gradient) for n, gradient in arrived if made[n].requires_grad]
        roots += [(loss, torch.full_like(loss, self.given.scale)) for loss in losses if loss.requires_grad]
        outputs, gradients = [root for root, _ in roots], [gradient for _, gradient in roots]
        with self.engine.cells[i.cell].going_backward(i.micro_batch):
            if i.op is Op.INPUT_GRADIENT:
                waits = self._waits.setdefault(i.cell, {})
                self.buffers.weight_halves[place] = backward_of_inputs(outputs, gradients, inputs, waits)
            elif roots:
                torch.autograd.backward(outputs, gradients)
        if i.cell > 0:
            self.buffers.input_gradients[place] = [
                None if tensor.grad is None else canonical_gradient(tensor.grad, is_channels_last(tensor))
                for tensor in (inputs[number] for number in self._takers_in_front(i))
            ]

    def _weight_gradient(self, i: Instruction) -> None:
        with self.engine.cells[i.cell].going_backward(i.micro_batch):
            self.buffers.weight_halves.pop((i.cell, i.micro_batch)).run()

    def _take_output_gradients(self, i: Instruction) -> list[tuple[int, Tensor]]:
        """Returns the gradients that have come back to a cell's outputs, each with the index of its output."""
        if i.cell == self.engine.last:
            return []
        if self._is_local(i.cell):
            gradients = self.buffers.input_gradients.pop((i.cell + 1, i.micro_batch))
        else:
            gradients = self.buffers.output_gradients.pop((i.cell, i.micro_batch))
        takers = self.engine.boundaries[i.cell, self.signatures[i.micro_batch]].takers
        return [(number, gradient) for number, gradient in zip(takers, gradients, strict=True) if gradient is not None]

    def _send_gradient(self, i: Instruction) -> None:
        spec = self.engine.messages[i.cell - 1, self.signatures[i.micro_batch]].gradients  # it came with activations
        gradients = self.buffers.input_gradients.pop((i.cell, i.micro_batch))
        device = self.engine.device
        content = tuple(
            torch.zeros(described.shape, dtype=described.dtype, device=device) if gradient is None else gradient
            for gradient, described in zip(gradients, spec.tensors, strict=False)
        )
        flags = (_flags([gradient is not None for gradient in gradients]),) if gradients else ()
        self._send(i, content + flags, spec)

    def _receive_gradient(self, i: Instruction) -> None:
        *gradients, flags = self._receive(i) or (None,)
        there = [] if flags is None else flags.tolist()
        self.buffers.output_gradients[i.cell, i.micro_batch] = [
            gradient if is_there else None for gradient, is_there in zip(gradients, there, strict=True)
        ]

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


def _flags(values: Sequence[bool]) -> Tensor:
    """Returns what a message says of the tensors that may take, or be, a gradient."""
    return torch.tensor(values, dtype=torch.uint8)
