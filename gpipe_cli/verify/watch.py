"""Records the pipelined side of gpipe-verify: the real trainer, with hooks on its layers and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.layer_state import LayerState, named_tensors
from ..metrics.step_report import StepReport
from ..pipeline.cell import BuiltLayer
from ..pipeline.messages.grouping import as_tensors
from ..position import Position
from ..trainer.assembly import Assembly
from ..trainer.loop import Trainer
from .record import (
    AGAIN,
    HELD,
    INPUT,
    MODE,
    OUTPUT,
    RATE,
    SEED,
    USED,
    WEIGHTS,
    Call,
    Point,
    RecordedStep,
    Recorder,
    Seen,
    fingerprint,
    mode_of,
    named,
    named_buffers,
)
from .spill import Spill


class RunWatch:
    """Records steps of this worker, by hooks on its layers and its optimizer, and what it holds between them.

    Args:
        assembly: of the worker.
        where: the micro-batch that runs and its instruction, kept up to date by the engine.
        spill: where tensors of the model's size are written; replica 0 writes them.

    Attributes:
        active: whether anything is recorded.
        record: of the last step, as long as it was active.
    """

    def __init__(self, assembly: Assembly, where: Position, spill: Spill) -> None:
        self._replica, self._device = assembly.world.replica, assembly.world.device
        self._where, self._spill, self._recorder = where, spill, Recorder()
        self._layers = [(layer.index, layer.name, layer.module) for cell in assembly.cells for layer in cell.layers]
        self._named = dict(named(self._layers))
        self._trainer: Trainer | None = None
        self.active = False
        self.record = RecordedStep()
        for layers in (cell.layers for cell in assembly.cells):
            for layer in layers:
                # Functions, because a copy of the module then calls the same watch.
                layer.module.register_forward_pre_hook(self._before(layer, layer is layers[0]))
                layer.module.register_forward_hook(self._after(layer.index))

    def follow(self, trainer: Trainer) -> None:
        """Watches the steps of a trainer from now on."""
        self._trainer = trainer
        trainer.around_update = self._around_update
        trainer.updater.optimizer.register_step_pre_hook(self._before_update)

    def take(self) -> Seen:
        """Returns what was seen since the last call."""
        return self._recorder.take()

    def hold(self, moment: str) -> None:
        """Writes what this worker holds, layer by layer, and records its fingerprints."""
        assert self._trainer is not None
        states = self._trainer.updater.layer_states()
        for layer in self._layers:
            tensors = _held_by(layer, states[layer[1]])
            for key, tensor in tensors.items():
                self._recorder.note(HELD, (self._replica, layer[0], key), fingerprint(tensor))
            if self._replica == 0:
                self._spill.put(moment, layer[0], tensors)

    @torch.no_grad()
    def forget(self) -> None:
        """Overwrites what a checkpoint holds of this worker's weights and buffers: a resume has to restore it."""
        for _, _, module in self._layers:
            for tensor in (tensor for tensors in named_tensors(module) for tensor in tensors.values()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)

    def _call(self, layer: int) -> tuple[Call, str]:
        again = AGAIN if self._where.instruction == "recompute" else ""
        return (self._replica, cast(int, self._where.micro_batch), layer), again

    def _before(self, layer: BuiltLayer, begins_cell: bool) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if self.active:
                (call, again), recorder = self._call(layer.index), self._recorder
                recorder.weights(WEIGHTS + again, call, module.parameters())  # or what stands in their place: the casts
                recorder.note(SEED + again, call, torch.initial_seed())
                recorder.note(MODE + again, call, mode_of(module, self._device))
                for number, tensor in enumerate(as_tensors(inputs[0]) if begins_cell else ()):
                    recorder.note(INPUT + again, Point(*call, number), fingerprint(tensor))

        return hook

    def _after(self, layer: int) -> Callable[[nn.Module, Any, object], None]:
        def hook(module: nn.Module, inputs: Any, outputs: object) -> None:
            if self.active:
                call, again = self._call(layer)
                (argument,) = inputs  # a tensor or a tuple of them
                self._recorder.outputs(OUTPUT + again, call, as_tensors(outputs), as_tensors(argument))

        return hook

    def _before_update(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """Records the gradients and the learning rates that the optimizer is given."""
        if not self.active:
            return
        rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"] if "lr" in group}
        for key, parameter in self._named.items():
            if parameter in rates:
                self._recorder.note(RATE, key, float(rates[parameter]))
            if parameter.grad is not None:
                used = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
                self._recorder.note(USED, key, float(used))

    @contextmanager
    def _around_update(self, report: StepReport) -> Iterator[None]:
        """Writes the gradients before the update, whole and not yet clipped, and what is held after it."""
        assert self._trainer is not None
        number, scale = self._trainer.progress.step + 1, self._trainer.progress.loss_scale or 1.0
        if not self.active:
            yield
            return
        for layer in self._layers if self._replica == 0 else []:
            own = {key: p.grad for (_, key), p in named([layer]) if p.grad is not None}
            self._spill.put(f"gradients {number}", layer[0], own)
        yield
        self.hold(f"held {number}")
        losses = {(r, m): loss for r, row in enumerate(report.losses) for m, loss in enumerate(row)}
        self.record = RecordedStep(
            report.loss, losses, report.statistics, report.gradient_norm, scale, self._recorder.take()
        )


def _held_by(layer: tuple[int, str, nn.Module], state: LayerState) -> dict[str, Tensor]:
    """Returns weights, buffers, optimizer state and averages of a layer under the names that `check.py` expects."""
    name = layer[1]
    held: dict[str, Tensor] = {f"weight/{key}": parameter for (_, key), parameter in named([layer])}
    held |= {f"buffer/{key}": buffer for (_, key), buffer in named_buffers([layer]).items()}
    for parameter, values in state.optimizer.items():
        numbers = {key: value for key, value in values.items() if isinstance(value, (Tensor, int, float))}
        held |= {f"state/{name}.{parameter}:{key}": torch.as_tensor(value) for key, value in numbers.items()}
    return held | {f"average/{name}.{key}": average for key, average in state.averages.items()}
