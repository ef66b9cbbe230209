"""The pipelined side of gpipe-verify: the real trainer, watched while it takes its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from ..metrics.step_report import StepReport
from ..micro_batch import Tensors
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
    """Looks at what every layer of a worker gets and gives, by hooks on the modules: the engine knows nothing of it.

    Args:
        cells: the worker's.
        replica: of the worker.
        where: kept up to date by the engine; says which micro-batch runs, and whether it is computed again.
    """

    def __init__(self, cells: Iterable[Cell], replica: int, where: Position) -> None:
        self._replica, self._where = replica, where
        self._seen = LayerTrace()
        for layer in (layer for cell in cells for layer in cell.layers):
            layer.module.register_forward_pre_hook(_Before(self, layer.index))
            layer.module.register_forward_hook(_After(self, layer.index))

    def take(self) -> LayerTrace:
        """What was seen since the last call."""
        seen, self._seen = self._seen, LayerTrace()
        return seen

    def before(self, layer: int, module: nn.Module) -> None:
        kind = WEIGHTS_AGAIN if self._again else WEIGHTS
        self._seen.weights(kind, self._replica, self._micro_batch, layer, module)

    def after(self, layer: int, inputs: Any, outputs: object) -> None:
        kind = RECOMPUTED if self._again else OUTPUT
        self._seen.outputs(kind, self._replica, self._micro_batch, layer, as_tensors(outputs), _flat(inputs))

    @property
    def _again(self) -> bool:
        return self._where.instruction == "recompute"

    @property
    def _micro_batch(self) -> int:
        return cast(int, self._where.micro_batch)


class _Before:
    """A hook in front of a layer; a class, so that a copied module still tells of itself."""

    def __init__(self, watch: LayerWatch, layer: int) -> None:
        self.watch, self.layer = watch, layer

    def __deepcopy__(self, memo: object) -> _Before:
        return self

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self.watch.before(self.layer, module)


class _After:
    """A hook behind a layer."""

    def __init__(self, watch: LayerWatch, layer: int) -> None:
        self.watch, self.layer = watch, layer

    def __deepcopy__(self, memo: object) -> _After:
        return self

    def __call__(self, module: nn.Module, inputs: Any, outputs: object) -> None:
        self.watch.after(self.layer, inputs, outputs)


def _flat(inputs: Any) -> Tensors:
    """A layer has one argument: a tensor or a tuple of them."""
    (argument,) = inputs
    return as_tensors(argument)


class StepWatch:
    """Keeps what each of the trainer's first steps leaves on this worker."""

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
