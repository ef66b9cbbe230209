"""The engine: one worker's interpreter of its list of instructions (paper, sections 2.2 and 2.3).

One training step of K = 3 cells on 3 workers with M = 2 micro-batches; time runs to the right, F forward, R recompute,
B backward, the digit is the micro-batch:

    cell 2            F0 F1 B1 B1 R0 B0 B0               [1] F keeps only its input, unless its graph is used next
    cell 1         F0 F1          B1 B1 R0 B0 B0         [2] R starts before the gradient arrives
    cell 0      F0 F1                   B1 B1 R0 B0 B0   [3] the micro-batch that comes back first is not recomputed
                                                         [4] B hands back the gradient of its input and forgets
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..micro_batch import MicroBatch, Tensors
from ..position import Position
from ..schedule.instruction import Instruction, Op
from .boundary import BoundarySpec, canonical_gradient, fresh_leaves, is_channels_last
from .cell import Cell, LayerFailed
from .halves import WeightHalf, backward_of_inputs
from .meter import Meter
from .receives import ReceivesAhead
from .transport import ACTIVATION, GRADIENT, PendingReceive, Transport

TASK = -1  # stands for the task's loss where auxiliary losses have the index of their layer

Loss = Callable[[Tensors, Tensors], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StepInput:
    """What every worker of a replica knows about a mini-batch before it begins.

    Attributes:
        step: number of the training step; the noise depends on it.
        steps: of the whole run, for layers with a schedule of their own.
        signatures: for each micro-batch, something that is equal exactly when all its input shapes are equal.
        scale: 1 / weight of the whole mini-batch, over all replicas.
    """

    step: int
    steps: int
    signatures: tuple[Hashable, ...]
    scale: float


@dataclass
class StepRecord:
    """What one worker has to tell of a training step.

    Attributes:
        losses: unscaled sums by (layer, micro-batch): auxiliary losses under the index of their layer, the task's under
            `TASK`. One number each, so that adding them up gives the same bits for every K.
        statistics: sums of the task's statistics, on the last cell's worker.
    """

    losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    statistics: Tensor | None = None


@dataclass
class _Kept:
    """A micro-batch's graph between the run that built it and its backward."""

    outputs: Tensors
    scalars: list[Tensor]


class Pipeline:
    """One worker's part of a replica's pipeline.

    Args:
        cells: those of this worker, in order.
        placement: worker of every cell.
        transport: to the other workers; None when there are none.
        loss: (outputs, targets) of the last cell to (sum, statistics); it may raise ConfigurationError.
        targets: how many of the travelling tensors are targets.
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
        self.device = device
        self.meter = Meter(device)
        self._placement, self._last = tuple(placement), len(placement) - 1
        self._transport, self._loss, self._n_targets, self._autocast = transport, loss, targets, autocast
        self._where = where or Position()
        self._behind: dict[tuple[int, Hashable], BoundarySpec] = {}
        self._sink: Callable[[int, Tensors, Tensors], None] | None = None
        self._caches: dict[tuple[int, int], list[dict[str, Any]]] | None = None
        self._recomputed: set[tuple[int, int]] = set()
        self._handlers: dict[Op, Callable[[int, int], None]] = {
            Op.FORWARD: self._forward,
            Op.RECOMPUTE: self._recompute,
            Op.BACKWARD: self._backward,
            Op.INPUT_GRADIENT: self._input_gradient,
            Op.WEIGHT_GRADIENT: self._weight_gradient,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECEIVE_ACTIVATION: self._receive_activation,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.RECEIVE_GRADIENT: self._receive_gradient,
        }
        self._clear()

    @property
    def bytes_shared(self) -> int:
        """Of the memory that this worker shares with those that it sends to."""
        return 0 if self._transport is None else self._transport.bytes_shared

    # -- the two ways to run -----------------------------------------------------------------------------------

    def train_step(
        self, program: Sequence[Instruction], plan: StepInput, micro_batches: Sequence[MicroBatch] | None
    ) -> StepRecord:
        """Forward and backward of one mini-batch; gradients are added to the parameters' ``.grad``.

        Args:
            program: this worker's list of the schedule.
            plan: of the mini-batch.
            micro_batches: its micro-batches, on the worker of cell 0; None elsewhere.

        Raises:
            LayerFailed: an exception in a layer, with the layer's own as cause.
        """
        self._plan, self._record, self._sink = plan, StepRecord(), None
        self._recomputed = {(i.cell, i.micro_batch) for i in program if i.op is Op.RECOMPUTE}
        for cell in self.cells.values():
            cell.begin_step(plan.step, plan.steps)
        self._interpret(program, micro_batches)
        record = self._record
        held = (self._inputs, self._outputs, self._kept, self._put_off, self._gradients, self._received_gradients)
        if any((*held, self._receives)):
            raise RuntimeError("the step left something behind in the engine's buffers: the schedule is incomplete")
        self._clear()
        return record

    def run_forward(
        self,
        program: Sequence[Instruction],
        signatures: Sequence[Hashable],
        micro_batches: Sequence[MicroBatch] | None,
        sink: Callable[[int, Tensors, Tensors], None],
        caches: dict[tuple[int, int], list[dict[str, Any]]] | None = None,
    ) -> None:
        """Forward only, without noise or graph: evaluation and generation go through the same cells and messages.

        Args:
            program: this worker's list of a forward-only schedule.
            signatures: as in `StepInput`; distinct from those of training.
            micro_batches: on the worker of cell 0.
            sink: called on the worker of the last cell with (micro-batch, outputs, targets).
            caches: of generation, by (cell, micro-batch); they live as long as the caller keeps them.
        """
        self._plan = StepInput(0, 0, tuple(signatures), 0.0)
        self._sink, self._caches = sink, caches
        self._recomputed = set()
        with torch.no_grad():
            self._interpret(program, micro_batches)
        self._clear()

    def _clear(self) -> None:
        self._plan = StepInput(0, 0, (), 0.0)
        self._record = StepRecord()
        self._sink, self._caches, self._recomputed = None, None, set()
        self._inputs: dict[tuple[int, int], Tensors] = {}  # boundary in front of (cell, micro-batch)
        self._outputs: dict[tuple[int, int], Tensors] = {}  # boundary behind it, waiting to be sent
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._put_off: dict[tuple[int, int], WeightHalf] = {}
        self._gradients: dict[tuple[int, int], Tensors] = {}  # of the inputs of (cell, micro-batch)
        self._received_gradients: dict[tuple[int, int], Tensors] = {}  # of its outputs
        self._targets: dict[int, Tensors] = {}
        self._receives = ReceivesAhead((), self._post_receive, after_sends=False)

    def _interpret(self, program: Sequence[Instruction], micro_batches: Sequence[MicroBatch] | None) -> None:
        for number, (inputs, targets) in enumerate(micro_batches or ()):
            self._inputs[0, number] = self._to_device(inputs)
            self._targets[number] = self._to_device(targets)
        blocking = self._transport is not None and self._transport.blocks_device
        self._receives = ReceivesAhead(program, self._post_receive, after_sends=blocking)
        self._receives.post_ahead(Op.RECEIVE_ACTIVATION)
        meter, where, handlers = self.meter, self._where, self._handlers
        is_timed = self._sink is None  # translating may go on for days, and nobody asks where its time goes
        for instruction in program:
            op, cell, micro_batch = instruction.op, instruction.cell, instruction.micro_batch
            where.cell, where.micro_batch, where.instruction = cell, micro_batch, op.name.lower()
            if not is_timed:
                handlers[op](cell, micro_batch)
                continue
            started = meter.mark()
            handlers[op](cell, micro_batch)
            meter.record(instruction, started)
        where.cell = where.micro_batch = where.instruction = None  # what fails from here on, fails outside of them
        if self._transport is not None:
            self._transport.drain()

    def _to_device(self, tensors: Iterable[Tensor]) -> Tensors:
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)

    # -- computing ---------------------------------------------------------------------------------------------

    def _forward(self, cell: int, micro_batch: int) -> None:
        if self._sink is not None:
            self._infer(cell, micro_batch)
            return
        signature = self._plan.signatures[micro_batch]
        keep = (cell, micro_batch) not in self._recomputed
        spec = self._behind.get((cell, signature))
        # [1] Without a graph nobody could tell which outputs need a gradient, so the first run of a shape builds one.
        if keep or spec is None:
            kept = self._run_with_graph(cell, micro_batch, first_time=True, score=keep)
            outputs = tuple(tensor.detach() for tensor in kept.outputs)
            if spec is None:
                spec = self._behind[cell, signature] = BoundarySpec.of(kept.outputs)
            if keep:
                self._kept[cell, micro_batch] = self._forget_scored_outputs(cell, kept)
        else:
            with torch.no_grad(), self._autocast():
                outputs, _ = self._run(cell, micro_batch, first_time=True)
        if cell != self._last:
            self._pass_on(cell, micro_batch, outputs, spec)

    def _recompute(self, cell: int, micro_batch: int) -> None:
        kept = self._run_with_graph(cell, micro_batch, first_time=False, score=True)  # [2]
        self._kept[cell, micro_batch] = self._forget_scored_outputs(cell, kept)

    def _run_with_graph(self, cell: int, micro_batch: int, first_time: bool, score: bool) -> _Kept:
        """F_k with a graph; ``score``: this is the run that backward will use, so its losses count."""
        with torch.enable_grad(), self._autocast():
            outputs, losses = self._run(cell, micro_batch, first_time)
            if cell == self._last and score:
                losses[TASK], statistics = self._score(outputs, micro_batch)
                seen = self._record.statistics
                self._record.statistics = statistics if seen is None else seen + statistics
        if score:
            self._record.losses |= {(layer, micro_batch): loss.detach().clone() for layer, loss in losses.items()}
        return _Kept(outputs, list(losses.values()))

    def _run(self, cell: int, micro_batch: int, first_time: bool) -> tuple[Tensors, dict[int, Tensor]]:
        plan = self._plan
        return self.cells[cell].run_training(
            self._inputs[cell, micro_batch],
            self._targets[micro_batch],
            plan.step,
            micro_batch,
            plan.signatures[micro_batch],
            first_time,
        )

    def _score(self, outputs: Tensors, micro_batch: int) -> tuple[Tensor, Tensor]:
        try:
            return self._loss(outputs, self._targets[micro_batch])
        except ConfigurationError:
            raise
        except Exception as error:
            raise LayerFailed(f"cell {self._last}, the task's loss, micro-batch {micro_batch}") from error

    def _forget_scored_outputs(self, cell: int, kept: _Kept) -> _Kept:
        """The last cell's outputs (logits) are dropped as soon as the loss is known; its graph keeps what it needs."""
        return _Kept((), kept.scalars) if cell == self._last else kept

    def _backward(self, cell: int, micro_batch: int, whole: bool = True) -> None:
        kept = self._kept.pop((cell, micro_batch))  # [3]
        inputs = self._inputs.pop((cell, micro_batch))
        gradients = iter(self._take_output_gradients(cell, micro_batch))
        roots = [(tensor, next(gradients)) for tensor in kept.outputs if tensor.requires_grad]
        scalars = [scalar for scalar in kept.scalars if scalar.requires_grad]
        roots += [(scalar, torch.full_like(scalar, self._plan.scale)) for scalar in scalars]
        outputs, arrived = [root for root, _ in roots], [gradient for _, gradient in roots]
        with self.cells[cell].going_backward(micro_batch):
            if not whole:
                self._put_off[cell, micro_batch] = backward_of_inputs(outputs, arrived, inputs)
            elif roots:
                torch.autograd.backward(outputs, arrived)
        if cell > 0:
            self._gradients[cell, micro_batch] = tuple(
                torch.zeros_like(tensor)
                if tensor.grad is None
                else canonical_gradient(tensor.grad, is_channels_last(tensor))
                for tensor in inputs
                if tensor.requires_grad
            )

    def _input_gradient(self, cell: int, micro_batch: int) -> None:
        self._backward(cell, micro_batch, whole=False)

    def _weight_gradient(self, cell: int, micro_batch: int) -> None:
        with self.cells[cell].going_backward(micro_batch):
            self._put_off.pop((cell, micro_batch)).run()

    def _take_output_gradients(self, cell: int, micro_batch: int) -> Tensors:
        if cell == self._last:
            return ()
        if self._placement[cell + 1] == self._placement[cell]:
            return self._gradients.pop((cell + 1, micro_batch))
        return self._received_gradients.pop((cell, micro_batch))

    def _infer(self, cell: int, micro_batch: int) -> None:
        signature = self._plan.signatures[micro_batch]
        caches = None
        if self._caches is not None:
            runs = self.cells[cell]
            caches = self._caches.setdefault((cell, micro_batch), [{} for _ in runs.layers])
        with self._autocast():
            outputs = self.cells[cell].run_inference(self._inputs.pop((cell, micro_batch)), micro_batch, caches)
        if cell == self._last:
            assert self._sink is not None
            self._sink(micro_batch, outputs, self._targets[micro_batch])
        else:
            spec = self._behind.get((cell, signature))
            if spec is None:
                spec = self._behind[cell, signature] = BoundarySpec.of(outputs)
            self._pass_on(cell, micro_batch, outputs, spec)

    def _pass_on(self, cell: int, micro_batch: int, outputs: Tensors, spec: BoundarySpec) -> None:
        """Inside a worker a boundary is a reference; towards another it waits for its send instruction."""
        if self._placement[cell + 1] == self._placement[cell]:
            self._inputs[cell + 1, micro_batch] = fresh_leaves(outputs, spec)
        else:
            self._outputs[cell, micro_batch] = outputs

    # -- messages ----------------------------------------------------------------------------------------------

    def _message_spec(self, boundary: BoundarySpec, micro_batch: int) -> BoundarySpec:
        """Activations and, behind them, the targets of the micro-batch, which travel on to the last cell."""
        return BoundarySpec(boundary.tensors + BoundarySpec.of(self._targets[micro_batch]).tensors)

    def _send_activation(self, cell: int, micro_batch: int) -> None:
        assert self._transport is not None
        signature = self._plan.signatures[micro_batch]
        spec = self._transport.known(cell + 1, signature)
        if spec is None:
            spec = self._message_spec(self._behind[cell, signature], micro_batch)
            self._transport.describe(cell + 1, signature, spec)
        tensors = self._outputs.pop((cell, micro_batch)) + self._targets[micro_batch]
        self.cells[cell].refuse_new_shapes(tensors, spec, micro_batch)
        self._transport.send(ACTIVATION, tensors, spec, cell + 1, cell + 1, micro_batch)
        self._receives.has_sent()

    def _receive_activation(self, cell: int, micro_batch: int) -> None:
        assert self._transport is not None
        pending = self._receives.take(Op.RECEIVE_ACTIVATION, cell, micro_batch)
        if pending is None:
            signature = self._plan.signatures[micro_batch]
            spec = self._transport.known(cell, signature) or self._transport.learn(cell, cell - 1, signature)
            pending = self._transport.post(ACTIVATION, spec, cell - 1, cell, micro_batch)
        self._receives.post_ahead(Op.RECEIVE_ACTIVATION)
        # Targets stay until the step ends, and would keep the whole message.
        tensors = self._transport.finish(pending, apart=self._n_targets)
        split = len(tensors) - self._n_targets
        for tensor, described in zip(tensors[:split], pending.spec.tensors, strict=False):
            if described.needs_gradient:  # it collects the gradient that will be sent back
                tensor.requires_grad_()
        self._inputs[cell, micro_batch], self._targets[micro_batch] = tensors[:split], tensors[split:]

    def _send_gradient(self, cell: int, micro_batch: int) -> None:
        assert self._transport is not None
        boundary = self._transport.known(cell, self._plan.signatures[micro_batch])
        assert boundary is not None  # the activation came through it
        gradients = self._gradients.pop((cell, micro_batch))  # [4]
        self._transport.send(GRADIENT, gradients, boundary.gradients, cell - 1, cell, micro_batch)
        self._receives.has_sent()

    def _receive_gradient(self, cell: int, micro_batch: int) -> None:
        assert self._transport is not None
        pending = self._receives.take(Op.RECEIVE_GRADIENT, cell, micro_batch)
        pending = pending or self._post_receive(Op.RECEIVE_GRADIENT, cell, micro_batch)
        assert pending is not None  # its boundary is known: the activation went out through it
        self._receives.post_ahead(Op.RECEIVE_GRADIENT)
        self._received_gradients[cell, micro_batch] = self._transport.finish(pending)

    def _post_receive(self, op: Op, cell: int, micro_batch: int) -> PendingReceive | None:
        """None when the boundary's shapes are not known yet."""
        assert self._transport is not None
        signature = self._plan.signatures[micro_batch]
        if op is Op.RECEIVE_ACTIVATION:
            spec = self._transport.known(cell, signature)
            return None if spec is None else self._transport.post(ACTIVATION, spec, cell - 1, cell, micro_batch)
        boundary = self._behind.get((cell, signature))
        if boundary is None:
            return None
        return self._transport.post(GRADIENT, boundary.gradients, cell + 1, cell + 1, micro_batch)
