"""Records the pipelined side of gpipe-verify: the real trainer, with hooks on its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from ..metrics.step_report import StepReport
from ..pipeline.batchnorm import DeferredBatchNorm
from ..pipeline.boundary import as_tensors
from ..pipeline.cell import Cell
from ..position import Position
from ..trainer.assembly import Assembly
from ..trainer.loop import Trainer
from .record import (
    OUTPUT,
    RECOMPUTED,
    WEIGHTS,
    WEIGHTS_AGAIN,
    Key,
    LayerTrace,
    StepState,
    copied,
    modules_of,
    named,
    named_buffers,
    optimizer_state,
)


class LayerWatch:
    """Records inputs and outputs of every layer of a worker, by hooks on the modules; the engine is unchanged.

    Args:
        cells: the worker's.
        replica: of the worker.
        where: the micro-batch that runs and its instruction, kept up to date by the engine.
    """

    def __init__(self, cells: Iterable[Cell], replica: int, where: Position) -> None:
        self._replica, self._where = replica, where
        self._seen = LayerTrace()
        for layer in (layer for cell in cells for layer in cell.layers):
            # Functions, because a copy of the module then calls the same watch.
            layer.module.register_forward_pre_hook(self._before(layer.index))
            layer.module.register_forward_hook(self._after(layer.index))

    def take(self) -> LayerTrace:
        """Returns the record since the last call."""
        seen, self._seen = self._seen, LayerTrace()
        return seen

    def _before(self, layer: int) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            kind = WEIGHTS_AGAIN if self._again else WEIGHTS
            self._seen.weights(kind, self._replica, self._micro_batch, layer, module)

        return hook

    def _after(self, layer: int) -> Callable[[nn.Module, Any, object], None]:
        def hook(module: nn.Module, inputs: Any, outputs: object) -> None:
            kind = RECOMPUTED if self._again else OUTPUT
            (argument,) = inputs  # a tensor or a tuple of them
            places = self._replica, self._micro_batch, layer
            self._seen.outputs(kind, *places, as_tensors(outputs), as_tensors(argument))

        return hook

    @property
    def _again(self) -> bool:
        return self._where.instruction == "recompute"

    @property
    def _micro_batch(self) -> int:
        return cast(int, self._where.micro_batch)


class StepWatch:
    """Keeps a record of each of the trainer's first steps on this worker."""

    def __init__(self, trainer: Trainer, assembly: Assembly) -> None:
        self._trainer = trainer
        self.states: list[StepState] = []
        self._layers = [(layer.index, layer.name, layer.module) for cell in assembly.cells for layer in cell.layers]
        self._named = dict(named(self._layers))
        self._watch = LayerWatch(assembly.cells, assembly.world.replica, trainer.where)
        trainer.around_update = self._around_update

    def run_steps(self, count: int) -> None:
        """Takes at most ``count`` steps, without evaluation or checkpoint; fewer where the data or the run ends."""
        for _ in self._trainer.steps():
            self._watch.take()  # of a step that was not finite, and so ran once more
            if len(self.states) >= count:
                break

    def held(self) -> StepState:
        """Returns copies of this worker's weights and buffers."""
        return StepState(weights=copied(self._named), buffers=copied(named_buffers(self._layers)))

    @contextmanager
    def _around_update(self, report: StepReport) -> Iterator[None]:
        """Copies the gradients before the update, whole and not yet clipped, and the weights after it."""
        gradients = {key: parameter.grad for key, parameter in self._named.items() if parameter.grad is not None}
        state = StepState(
            loss=report.loss,
            losses={(r, m): loss for r, row in enumerate(report.losses) for m, loss in enumerate(row)},
            gradient_norm=report.gradient_norm,
            gradients=copied(gradients),
            counted=self._counted(),
            trace=self._watch.take().trace,
        )
        yield
        after = self.held()
        state.weights, state.buffers = after.weights, after.buffers
        state.optimizer = copied(optimizer_state(self._trainer.updater.optimizer, self._named))
        self.states.append(state)

    def _counted(self) -> dict[Key, float]:
        """Returns how many values a channel each BatchNorm of this worker has gathered in the step."""
        found = modules_of(DeferredBatchNorm, self._layers)
        return {key: batchnorm.gathered_count for key, batchnorm in found.items()}
