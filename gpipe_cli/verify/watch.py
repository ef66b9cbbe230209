"""Records the pipelined side of gpipe-verify: the real trainer, with hooks on its layers and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.layer_state import LayerState, named_tensors
from ..metrics.step_report import StepReport
from ..pipeline.batchnorm import DeferredBatchNorm
from ..pipeline.cell import BuiltLayer, Cell
from ..pipeline.messages.grouping import as_tensors
from ..position import Position
from ..trainer.assembly import Assembly
from ..trainer.loop import Trainer
from .record import (
    INPUT,
    INPUT_AGAIN,
    OUTPUT,
    RECOMPUTED,
    WEIGHTS,
    WEIGHTS_AGAIN,
    Call,
    Fingerprint,
    Key,
    LayerTrace,
    Point,
    RecordedStep,
    fingerprint,
    modules_of,
    named,
    named_buffers,
)
from .spill import Spill


class LayerWatch:
    """Records inputs and outputs of every layer of a worker, by hooks on the modules; the engine is unchanged.

    Args:
        cells: the worker's.
        replica, device: of the worker.
        where: the micro-batch that runs and its instruction, kept up to date by the engine.

    Attributes:
        active: whether anything is recorded.
    """

    def __init__(self, cells: Iterable[Cell], replica: int, device: torch.device, where: Position) -> None:
        self._replica, self._device, self._where = replica, device, where
        self._seen = LayerTrace()
        self.active = False
        for layers in (cell.layers for cell in cells):
            for layer in layers:
                # Functions, because a copy of the module then calls the same watch.
                layer.module.register_forward_pre_hook(self._before(layer, layer is layers[0]))
                layer.module.register_forward_hook(self._after(layer.index))

    def take(self) -> LayerTrace:
        """Returns the record since the last call."""
        seen, self._seen = self._seen, LayerTrace()
        return seen

    def _before(self, layer: BuiltLayer, begins_cell: bool) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if self.active:
                kind, call = WEIGHTS_AGAIN if self._again else WEIGHTS, self._call(layer.index)
                self._seen.inputs(kind, call, list(module.parameters()))  # or what stands in their place: the casts
                self._seen.mode(kind, call, module, self._device)
                for number, tensor in enumerate(as_tensors(inputs[0]) if begins_cell else ()):
                    given = self._seen.trace.setdefault(INPUT_AGAIN if self._again else INPUT, {})
                    given[Point(*call, number)] = fingerprint(tensor)

        return hook

    def _after(self, layer: int) -> Callable[[nn.Module, Any, object], None]:
        def hook(module: nn.Module, inputs: Any, outputs: object) -> None:
            if self.active:
                kind = RECOMPUTED if self._again else OUTPUT
                (argument,) = inputs  # a tensor or a tuple of them
                self._seen.outputs(kind, self._call(layer), as_tensors(outputs), as_tensors(argument))

        return hook

    @property
    def _again(self) -> bool:
        return self._where.instruction == "recompute"

    def _call(self, layer: int) -> Call:
        return self._replica, cast(int, self._where.micro_batch), layer


class RunWatch:
    """Records steps of this worker, and what it holds between them.

    Args:
        assembly: of the worker.
        where: of its trainer.
        spill: where tensors of the model's size are written; replica 0 writes them.

    Attributes:
        active: whether the steps are recorded.
        records: of the steps, as long as it was active.
    """

    def __init__(self, assembly: Assembly, where: Position, spill: Spill) -> None:
        self._replica, self._spill = assembly.world.replica, spill
        self._layers = [(layer.index, layer.name, layer.module) for cell in assembly.cells for layer in cell.layers]
        self._named = dict(named(self._layers))
        self._watch = LayerWatch(assembly.cells, assembly.world.replica, assembly.world.device, where)
        self._trainer: Trainer | None = None
        self._used: dict[Key, float] = {}
        self._rates: dict[Key, float] = {}
        self.records: dict[int, RecordedStep] = {}

    def follow(self, trainer: Trainer) -> None:
        """Watches the steps of a trainer from now on."""
        self._trainer = trainer
        trainer.around_update = self._around_update
        trainer.updater.optimizer.register_step_pre_hook(self._before_update)

    @property
    def active(self) -> bool:
        return self._watch.active

    @active.setter
    def active(self, active: bool) -> None:
        self._watch.take()  # what a step that was not finite left: the trainer ran it once more
        self._watch.active = active

    def take(self) -> LayerTrace:
        """Returns what the layers have put out since the last step or call."""
        return self._watch.take()

    def hold(self, moment: str) -> dict[Key, Fingerprint]:
        """Writes what this worker holds, layer by layer; returns its fingerprints."""
        assert self._trainer is not None
        states = self._trainer.updater.layer_states()
        marks: dict[Key, Fingerprint] = {}
        for layer in self._layers:
            tensors = _held_by(layer, states[layer[1]])
            marks |= {(layer[0], key): fingerprint(tensor) for key, tensor in tensors.items()}
            if self._replica == 0:
                self._spill.put(moment, layer[0], tensors)
        return marks

    @torch.no_grad()
    def forget(self) -> None:
        """Overwrites what a checkpoint holds of this worker's weights and buffers: a resume has to restore it."""
        for _, _, module in self._layers:
            for tensor in (tensor for tensors in named_tensors(module) for tensor in tensors.values()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)

    def _before_update(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """Records the gradients and the learning rates that the optimizer is given."""
        if not self.active:
            return
        rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"] if "lr" in group}
        for key, parameter in self._named.items():
            if parameter in rates:
                self._rates[key] = float(rates[parameter])
            if parameter.grad is not None:
                self._used[key] = float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))

    @contextmanager
    def _around_update(self, report: StepReport) -> Iterator[None]:
        """Writes the gradients before the update, whole and not yet clipped, and what is held after it."""
        assert self._trainer is not None
        number, scale = self._trainer.progress.step + 1, self._trainer.progress.loss_scale or 1.0
        if not self.active:
            yield
            return
        self._used, self._rates = {}, {}
        for layer in self._layers if self._replica == 0 else []:
            own = {key: p.grad for (_, key), p in named([layer]) if p.grad is not None}
            self._spill.put(f"gradients {number}", layer[0], own)
        norms = modules_of(DeferredBatchNorm, self._layers).items()
        seen, counted = self._watch.take(), {key: norm.gathered_count for key, norm in norms}
        yield
        self.records[number] = RecordedStep(
            loss=report.loss,
            losses={(r, m): loss for r, row in enumerate(report.losses) for m, loss in enumerate(row)},
            statistics=report.statistics,
            gradient_norm=report.gradient_norm,
            loss_scale=scale,
            counted=counted,
            trace=seen.trace,
            seeds=seen.seeds,
            modes=seen.modes,
            rates=self._rates,
            used=self._used,
            held={self._replica: self.hold(f"held {number}")},
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
