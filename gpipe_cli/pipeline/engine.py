"""Runs the engine: one worker's interpreter of its list of instructions (paper, sections 2.2 and 2.3).

One training step of K=3 cells on three workers with M=3 micro-batches. Time runs to the right; F forward, R recompute,
B backward; the digit is the micro-batch (gpipe, remat except_last, as `schedule/picture.py` prints it):

    worker 0 | F0 F1 F2  .  .  .  . B2 R1 B1 R0 B0     [1] F keeps only the input of its cell and no graph
    worker 1 |  . F0 F1 F2  .  . B2 R1 B1 R0 B0  .     [2] unless no R follows, as for F2: then it keeps its graph
    worker 2 |  .  . F0 F1 F2 B2 R1 B1 R0 B0  .  .     [3] R builds the graph again, before the gradient arrives
                                                       [4] B uses graph and input up; the input's gradient goes back

`Engine` lives as long as the run. Every step gets an interpreter of its own, `_TrainingStep` or `_ForwardStep`, with
`StepBuffers` of its own: what a step holds ends with it.

What passes between two cells is described by a `BoundarySpec`, made in the first forward of each signature and then
kept. An output requires a gradient in the next cell exactly where it does in this one. Where that may differ from one
micro-batch to the next, each message of activations has flags that say it. Each message of gradients has flags, too:
an output that the cells behind have not used has no gradient, as in torch. Flags are the last tensor of a message.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..micro_batch import Loss, Tensors
from ..position import Position
from ..schedule.instruction import Instruction, Op
from ..schedule.posting import Posts, Receives, post_ahead
from .cell import Cell, LayerFailed, failed
from .halves import WeightHalf, backward_of_inputs
from .messages.boundary import BoundarySpec, canonical_gradient, fresh_leaves, grouped, grouping_of, is_channels_last
from .messages.transport import Transport, Wait
from .step import Meter, StepPlan, StepRecord

TASK = -1  # stands for the task's loss where auxiliary losses have the index of their layer
SENDS, RECEIVES = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT), (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)

Sink = Callable[[int, Tensors, Tensors], None]
Caches = dict[tuple[int, int], list[dict[str, Any]]]  # of generation, by (cell, micro-batch): one dict a layer
Handlers = Mapping[Op, Callable[..., None]]  # called with the step and the instruction
Gradients = Sequence[Tensor | None]
Graph = tuple[Tensors, list[Tensor]]  # the roots of a backward: outputs of a cell for one micro-batch, and its losses


class SenderFailed(RuntimeError):
    """Raised when a message is empty, because the worker that sends it has failed."""


@dataclass
class StepBuffers:
    """Holds the tensors that one step has made or received and not yet used up, by (cell, micro-batch).

    Attributes:
        inputs: the tensors that the cell reads. Those require a gradient that did so where they were made.
        outputs: the tensors that the cell has put out, until they are sent.
        graphs: outputs and losses whose graph is kept, from forward or recompute to backward.
        weight_halves: second halves of backwards that are still to run.
        input_gradients: the gradient of each input of the cell; None where nothing flowed back.
        output_gradients: the received gradient of each output of the cell; None where nothing flowed back.
        targets: the targets of each micro-batch, by its number, until the step ends.
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

        engine = Engine(cells, placement, transport, loss, targets=1, device=device)
        record = engine.train_step(instructions, plan)      # gradients are in the parameters' .grad now

    Args:
        cells: this worker's cells, in order.
        placement: worker of every cell.
        transport: sends to the other workers and receives from them; None when there are none.
        loss: maps the last cell's (outputs, targets) to (sum of the loss, statistics); may raise ConfigurationError.
        targets: number of targets among the tensors of a message.
        device: the device on which the cells run.
        autocast: makes the context in which forward runs.
        where: the engine writes into it what runs, for error reports.

    Attributes:
        running: the instruction whose layers run, for hooks on them.
        frees_peers: True if a worker that fails still receives, and sends zeros, so that its peers can finish the step.
        failed_at: `time.time()` of the latest failure.
    """

    running: Instruction
    frees_peers = False
    failed_at = 0.0

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
        self.noise, self.meter = cells[0].noise, Meter(device, self.where)
        self._transport = transport
        self.receives_block_device = transport is not None and transport.blocks_device  # posted by `post_early`
        # Descriptions by (cell in front of the boundary, signature of the micro-batch):
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
        plan: StepPlan,
        posts: Posts | None = None,
        timed: bool = True,
        cell_ended: Callable[[int], None] | None = None,
    ) -> StepRecord:
        """Runs forward and backward of one mini-batch and adds the gradients to the parameters' ``.grad``.

        Args:
            instructions: this worker's list of the schedule.
            plan: describes the mini-batch.
            posts: receives by the position before which they are posted; None: those of `post_ahead`.
            timed: True to record the time of every instruction in the engine's meter.
            cell_ended: function that is called with the number of each cell whose gradients are whole, behind its last
                instruction; None: nothing is called.

        Raises:
            LayerFailed: an exception in a layer, with the layer's own as cause.
        """
        with self.noise.restored():
            step = _TrainingStep(self, instructions, plan, posts)
            step.run(self.meter if timed else None, cell_ended)
        for cell in self.cells.values():
            cell.end_step()
        return step.record

    def run_forward(
        self,
        instructions: Sequence[Instruction],
        plan: StepPlan,
        sink: Sink,
        caches: Caches | None = None,
        posts: Posts | None = None,
        number: Sequence[int] = (0, 0),
    ) -> None:
        """Runs forward only, without a graph, for evaluation and generation.

        Args:
            instructions: this worker's list of a forward-only schedule.
            plan: describes the micro-batches, by signatures that are distinct from those of training.
            sink: called on the worker of the last cell with (micro-batch, outputs, targets).
            caches: values that layers keep in generation, by (cell, micro-batch), as long as the caller keeps them.
            posts: argument of `train_step`.
            number: (training steps done, forwards since then), which seeds layers that draw noise in evaluation, too.
        """
        with torch.no_grad(), self.noise.restored():
            _ForwardStep(self, instructions, plan, posts, sink, caches, number).run(None)

    def describe_anew(self) -> None:
        """Forgets the descriptions of boundaries, so that the next forward makes new ones.

        All workers call it at the same time, between two steps.
        """
        self.boundaries.clear()
        self.messages.clear()
        for cell in self.cells.values():
            cell.describe_anew()

    def forget_failure(self) -> None:
        """Forgets what a failed step has left (descriptions, casts, statistics); all workers call it together."""
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


@dataclass
class _Step:
    """Interprets the instruction list of one step, in the part that training and forward-only steps share.

    Attributes:
        engine: this worker's engine.
        instructions: this worker's list.
        plan: the mini-batch, and how it is run.
        posts: receives by the position before which they are posted; None: those of `post_ahead`.
    """

    engine: Engine
    instructions: Sequence[Instruction]
    plan: StepPlan
    posts: Posts | None

    def __post_init__(self) -> None:
        self.signatures, self.buffers = self.plan.signatures, StepBuffers()
        for number, (inputs, targets) in enumerate(self.plan.micro_batches or ()):
            self.buffers.inputs[0, number] = self._to_device(inputs)
            self.buffers.targets[number] = self._to_device(targets)
        posts = post_ahead(self.instructions) if self.posts is None else self.posts
        self._receives = Receives(posts, self._post) if posts else None

    def run(self, meter: Meter | None, cell_ended: Callable[[int], None] | None = None) -> None:
        """Executes the list.

        Args:
            meter: records the time of every instruction; None: times are not taken.
            cell_ended: argument of `Engine.train_step`.
        """
        where, position, op = self.engine.where, -1, Op.FORWARD
        last_of_cell = {i.cell: at for at, i in enumerate(self.instructions)} if cell_ended is not None else {}
        try:
            self._begin()
            for position, instruction in enumerate(self.instructions):
                op, self.engine.running = instruction.op, instruction
                if self._receives is not None:
                    self._receives.post_due(position)
                where.enter(instruction.cell, instruction.micro_batch, op.name.lower())
                started = None if meter is None else meter.mark()
                self.HANDLERS[op](self, instruction)
                if meter is not None:
                    meter.record(instruction, started)
                if cell_ended is not None and last_of_cell[instruction.cell] == position:
                    cell_ended(instruction.cell)
        except BaseException as error:
            self.engine.failed_at = time.time()
            is_lost = op in RECEIVES and not isinstance(error, SenderFailed)  # the peer or the connection has ended
            if self.engine.frees_peers and not is_lost:
                self._send_nothing(position if op in SENDS else position + 1)  # a send that fails has not sent
            raise
        where.leave()
        self.engine.drain()

    def _begin(self) -> None:
        """Makes the layers ready, before the first instruction."""

    def _send_nothing(self, position: int) -> None:
        """Goes through the rest of the list without computing. It receives all messages, and sends zeros in each.

        Where the receiver does not know the shapes of a message yet, an empty one is described; so the receiver fails,
        too (`SenderFailed`).

        Args:
            position: index of the first instruction of the rest.
        """
        engine, self.buffers = self.engine, StepBuffers()
        for place, i in enumerate(self.instructions[position:], position):
            if self._receives is not None:
                self._receives.post_due(place)
            if i.awaited_message is not None:
                self._receive(i)
            elif i.sent_message is not None:
                key = i.sent_message.boundary, self.signatures[i.micro_batch]
                if key not in engine.messages:
                    engine.messages[key] = BoundarySpec(())
                    engine.transport.send_spec(i.cell, engine.messages[key])
                spec = engine.messages[key] if i.op is Op.SEND_ACTIVATION else engine.messages[key].gradients
                zeros = (torch.zeros(one.shape, dtype=one.dtype, device=engine.device) for one in spec.tensors)
                self._send(i, tuple(zeros), spec)
        engine.drain()

    def _to_device(self, tensors: Iterable[Tensor]) -> Tensors:
        """Returns the tensors on this worker's device; the host does not wait for the copy."""
        return tuple(tensor.to(self.engine.device, non_blocking=True) for tensor in tensors)

    def _is_local(self, cell: int) -> bool:
        """Returns whether the boundary behind the cell lies inside this worker."""
        placement = self.engine.placement
        return placement[cell] == placement[cell + 1]

    def _pass_on(self, i: Instruction, leaves: Tensors) -> None:
        """Gives a cell's outputs to the next cell: at once inside a worker, else with the send that follows."""
        if self._is_local(i.cell):
            self.buffers.inputs[i.cell + 1, i.micro_batch] = leaves
        else:
            self.buffers.outputs[i.cell, i.micro_batch] = leaves

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
        tensors = grouped(outputs + targets + flags, grouping_of(outputs))
        if not spec.fits(tensors):
            raise engine.cells[i.cell].other_form(-1, i.micro_batch, tensors, spec)
        self._send(i, tensors, spec)

    def _bring(self, i: Instruction) -> None:
        """Begins to read the weights of an offloaded cell from its file."""
        if (state := self.engine.cells[i.cell].state) is not None:
            state.bring()

    def _take_away(self, i: Instruction) -> None:
        """Gives the memory of an offloaded cell back."""
        self.engine.cells[i.cell].take_away()

    def _send(self, i: Instruction, tensors: Tensors, spec: BoundarySpec) -> None:
        """Starts to send the tensors, which ``spec`` describes, as the instruction's message."""
        assert i.sent_message is not None
        self.engine.transport.send(i.sent_message, tensors, spec)

    def _receive_activation(self, i: Instruction) -> None:
        """Receives a cell's inputs and the micro-batch's targets.

        Raises:
            SenderFailed: the message is empty.
        """
        engine = self.engine
        tensors = list(self._receive(i))
        if not tensors:
            raise SenderFailed("the worker of the cell before has failed")
        spec = engine.messages[i.cell - 1, self.signatures[i.micro_batch]]
        flags = tensors.pop() if spec.has_flags else None
        for place, number in enumerate(spec.takers):
            tensors[number].requires_grad_(flags is None or bool(flags[place]))  # to collect what will be sent back
        split = len(tensors) - engine.n_targets
        self.buffers.inputs[i.cell, i.micro_batch] = grouped(tensors[:split], spec.grouping)
        self.buffers.targets[i.micro_batch] = tuple(tensors[split:])

    def _post(self, i: Instruction) -> Wait | None:
        """Posts the receive of an instruction; returns its wait, or None when the message's shapes are not known yet.

        With NCCL receives are posted after their sends. The description of new shapes is then on its way, and this
        waits for it.
        """
        message, engine = i.awaited_message, self.engine
        assert message is not None
        key, is_activation = (message.boundary, self.signatures[i.micro_batch]), i.op is Op.RECEIVE_ACTIVATION
        if key not in engine.messages and is_activation and engine.receives_block_device:
            engine.messages[key] = engine.transport.receive_spec(message.boundary)
        if (spec := engine.messages.get(key)) is None:
            return None
        return engine.transport.post(message, spec if is_activation else spec.gradients)

    def _receive(self, i: Instruction) -> Tensors:
        """Waits for the instruction's message and returns its tensors.

        If the shapes are new, this first waits for the description that precedes the message.
        """
        separate = 0  # how many of the last tensors get memory of their own
        if i.op is Op.RECEIVE_ACTIVATION:
            key = (i.cell - 1, self.signatures[i.micro_batch])
            if key not in self.engine.messages:
                self.engine.messages[key] = self.engine.transport.receive_spec(i.cell - 1)
            # Targets, behind which flags may lie, stay until the step ends: they would keep the whole message.
            separate = self.engine.n_targets + self.engine.messages[key].has_flags
        assert self._receives is not None  # the list has receives
        wait = self._receives.take(i) or self._post(i)
        assert wait is not None  # its shapes are known by now
        return wait(separate)

    HANDLERS: ClassVar[Handlers] = {
        Op.SEND_ACTIVATION: _send_activation,
        Op.RECEIVE_ACTIVATION: _receive_activation,
        Op.BRING: _bring,
        Op.TAKE_AWAY: _take_away,
    }


@dataclass
class _ForwardStep(_Step):
    """Interprets a forward-only list; ``sink``, ``caches`` and ``number`` as in `Engine.run_forward`."""

    sink: Sink
    caches: Caches | None
    number: Sequence[int]

    def _forward(self, i: Instruction) -> None:
        """Runs F_k without a graph; gives the outputs to the next cell or, of the last cell, to the sink."""
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

    HANDLERS: ClassVar[Handlers] = {**_Step.HANDLERS, Op.FORWARD: _forward}


@dataclass
class _TrainingStep(_Step):
    """Interprets a training list.

    Attributes:
        record: the results of the step.
    """

    record: StepRecord = field(default_factory=StepRecord)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._waits: dict[int, dict[int, bool]] = {}  # by cell, then id of a weight: see `backward_of_inputs`
        self._recomputed = {(i.cell, i.micro_batch) for i in self.instructions if i.op is Op.RECOMPUTE}

    def _begin(self) -> None:
        """Tells the layers the number of the step."""
        for cell in self.engine.cells.values():
            cell.begin_step(self.plan.step, self.plan.steps)

    def _forward(self, i: Instruction) -> None:
        """Runs F_k, with a graph where it is kept or needed to describe the boundary, and passes the outputs on."""
        keeps_graph = (i.cell, i.micro_batch) not in self._recomputed
        is_last, key = i.cell == self.engine.last, (i.cell, self.signatures[i.micro_batch])
        spec = self.engine.boundaries.get(key)
        # Only a graph shows which outputs require a gradient. So the first run with new shapes builds one, and so does
        # every run if the answer may vary.
        if keeps_graph or not (is_last or (spec is not None and not spec.varies)):
            outputs = self._run_with_graph(i, first_time=True, for_backward=keeps_graph)  # [2]
            if not is_last:
                self._pass_on(i, fresh_leaves(outputs))
        else:
            with torch.no_grad(), self.engine.autocast():
                outputs, _ = self._run(i, first_time=True, for_backward=False)  # [1]
            if spec is not None:
                self._pass_on(i, fresh_leaves(outputs, spec.takers))

    def _recompute(self, i: Instruction) -> None:
        """Runs F_k again, with a graph for the backward that follows."""
        self._run_with_graph(i, first_time=False, for_backward=True)  # [3]

    def _run_with_graph(self, i: Instruction, first_time: bool, for_backward: bool) -> Tensors:
        """Runs F_k with a graph and returns its outputs.

        Args:
            first_time: False for a recompute, in which BatchNorm gathers no statistics.
            for_backward: backward will use this run. Its graph is kept and its losses are recorded.
        """
        is_last = i.cell == self.engine.last
        with torch.enable_grad(), self.engine.autocast():
            outputs, losses = self._run(i, first_time, for_backward)
            if is_last and for_backward:
                losses[TASK] = self._score(outputs, i.micro_batch)
        if not is_last:
            self._describe_boundary(i, outputs)
        if for_backward:
            self.record.losses |= {(layer, i.micro_batch): loss.detach().clone() for layer, loss in losses.items()}
            # The last cell's outputs (logits) are not needed once the loss is known; its graph keeps what it needs.
            self.buffers.graphs[i.cell, i.micro_batch] = () if is_last else outputs, list(losses.values())
        return outputs

    def _describe_boundary(self, i: Instruction, outputs: Tensors) -> None:
        """Describes the boundary behind the cell when shapes are new; else checks it against the description.

        The description names the outputs that may require a gradient. Where the cell's graph may vary, and the cell or
        one before it is trained, these are all outputs: a modality that is dropped now may be used later.

        Raises:
            LayerFailed: an output requires a gradient that the description does not name. The next cell sends none
                back for it.
        """
        engine, cell, signature = self.engine, self.engine.cells[i.cell], self.signatures[i.micro_batch]
        wanted = [number for number, tensor in enumerate(outputs) if tensor.requires_grad]
        if (spec := engine.boundaries.get((i.cell, signature))) is not None:
            if new := [number for number in wanted if number not in spec.takers]:
                raise LayerFailed(
                    f"cell {i.cell} (last layer {cell.layers[-1].name!r}), micro-batch {i.micro_batch}: output "
                    f"{new[0]} takes a gradient, where nothing in front of it was trained before. Set requires_grad "
                    "before the first step or, in a loop of your own, between two steps; not in a layer's forward"
                )
            return
        before = (i.cell - 1, signature)
        in_front = engine.boundaries.get(before) or engine.messages.get(before)
        if cell.graph_varies and (cell.is_trained or (in_front is not None and bool(in_front.takers))):
            wanted = [n for n, tensor in enumerate(outputs) if tensor.is_floating_point() or tensor.is_complex()]
        engine.boundaries[i.cell, signature] = BoundarySpec.of(outputs).with_takers(wanted)

    def _run(self, i: Instruction, first_time: bool, for_backward: bool) -> tuple[Tensors, dict[int, Tensor]]:
        """Runs F_k; returns its outputs and its auxiliary losses by the index of their layer."""
        cell, number = self.engine.cells[i.cell], i.micro_batch
        inputs, targets = self.buffers.inputs[i.cell, number], self.buffers.targets[number]
        if not for_backward:  # hooks that layers put on their inputs must not be there twice
            inputs = fresh_leaves(inputs)
        with cell.weights_cast(self.engine.device):
            return cell.run_training(inputs, targets, self.plan.step, number, self.signatures[number], first_time)

    def _score(self, outputs: Tensors, micro_batch: int) -> Tensor:
        """Returns the task's loss of the last cell's outputs, 0 for an empty micro-batch, and adds its statistics."""
        self.engine.where.enter(self.engine.last, micro_batch, "the task's loss")
        try:
            loss, statistics = self.engine.loss(outputs, self.buffers.targets[micro_batch])
        except ConfigurationError:
            raise
        except Exception as error:
            text = f"cell {self.engine.last}, the task's loss, micro-batch {micro_batch}"
            raise failed(text, type(error)) from error
        noise, seen = self.engine.noise, self.record.statistics
        noise.seed_backward(noise.seeds(self.plan.step, micro_batch, [TASK])[0], [loss])
        self.record.statistics = statistics if seen is None else seen + statistics
        return torch.zeros_like(loss) if micro_batch in self.plan.empty else loss

    def _backward(self, i: Instruction) -> None:
        """Runs B_k or, for INPUT_GRADIENT, its first half; keeps the gradients of the cell's inputs."""
        place = i.cell, i.micro_batch
        (outputs, losses), inputs = self.buffers.graphs.pop(place), self.buffers.inputs.pop(place)  # [4]
        arrived = zip(outputs, self._output_gradients(i), strict=True)
        roots = [(output, gradient) for output, gradient in arrived if gradient is not None and output.requires_grad]
        roots += [(loss, torch.full_like(loss, self.plan.scale)) for loss in losses if loss.requires_grad]
        tensors, gradients = [root for root, _ in roots], [gradient for _, gradient in roots]
        with self.engine.cells[i.cell].going_backward(i.micro_batch):
            if i.op is Op.INPUT_GRADIENT:
                waits = self._waits.setdefault(i.cell, {})
                self.buffers.weight_halves[place] = backward_of_inputs(tensors, gradients, inputs, waits)
            elif roots:
                torch.autograd.backward(tensors, gradients)
        if i.cell > 0:
            self.buffers.input_gradients[place] = [
                None if tensor.grad is None else canonical_gradient(tensor.grad, is_channels_last(tensor))
                for tensor in inputs
            ]

    def _weight_gradient(self, i: Instruction) -> None:
        """Runs the second half of B_k, which adds up the gradients of the weights."""
        with self.engine.cells[i.cell].going_backward(i.micro_batch):
            self.buffers.weight_halves.pop((i.cell, i.micro_batch)).run()

    def _output_gradients(self, i: Instruction) -> Gradients:
        """Returns the gradient that has come back to each of the cell's outputs; None where nothing flowed."""
        if i.cell == self.engine.last:
            return ()
        if self._is_local(i.cell):
            return self.buffers.input_gradients.pop((i.cell + 1, i.micro_batch))
        return self.buffers.output_gradients.pop((i.cell, i.micro_batch))

    def _send_gradient(self, i: Instruction) -> None:
        """Sends a gradient for each input that may require one (zeros if none flowed), and flags that say which."""
        received = self.engine.messages[i.cell - 1, self.signatures[i.micro_batch]]
        made = self.buffers.input_gradients.pop((i.cell, i.micro_batch))
        gradients = [made[number] for number in received.takers]
        content = tuple(
            torch.zeros(described.shape, dtype=described.dtype, device=self.engine.device) if one is None else one
            for one, described in zip(gradients, received.gradients.tensors, strict=False)
        )
        if gradients:
            content += (_flags([one is not None for one in gradients]),)
        self._send(i, content, received.gradients)

    def _receive_gradient(self, i: Instruction) -> None:
        """Receives the gradients of the cell's outputs, None for each that the flags say is missing."""
        spec = self.engine.boundaries[i.cell, self.signatures[i.micro_batch]]
        found: list[Tensor | None] = [None] * len(spec.tensors)
        if arrived := self._receive(i):
            *gradients, flags = arrived
            for number, gradient, flowed in zip(spec.takers, gradients, flags.tolist(), strict=True):
                found[number] = gradient if flowed else None
        self.buffers.output_gradients[i.cell, i.micro_batch] = found

    HANDLERS: ClassVar[Handlers] = {
        **_Step.HANDLERS,
        Op.FORWARD: _forward,
        Op.RECOMPUTE: _recompute,
        Op.BACKWARD: _backward,
        Op.INPUT_GRADIENT: _backward,
        Op.WEIGHT_GRADIENT: _weight_gradient,
        Op.SEND_GRADIENT: _send_gradient,
        Op.RECEIVE_GRADIENT: _receive_gradient,
    }


def _flags(values: Sequence[bool]) -> Tensor:
    """Returns the flags of a message as uint8, one byte for each tensor that has a flag."""
    return torch.tensor(values, dtype=torch.uint8)
