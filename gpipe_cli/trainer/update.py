"""Updates the weights of this worker's cells: gradients, optimizer, learning rate, weight average, BatchNorm."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from ..checkpoint.files import CheckpointError, CheckpointInfo
from ..checkpoint.layer_state import LayerState, layer_state, load_layer, restore_layer
from ..distributed.optimizer_shards import OptimizerShards
from ..distributed.pipeline import WorkerPipeline
from ..errors import ConfigurationError
from ..optim.average import WeightAverage
from ..pipeline.batchnorm import finish_batchnorm
from ..pipeline.cell import Cell
from ..pipeline.gradients import ReplicaSums, clip_factor, scale_gradients, squared_norms
from ..pipeline.step import StepResult


class NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Refuses to draw random numbers inside the context, in this thread alone; others may read data meanwhile."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ConfigurationError(
                f"optimizer._target_: it draws random numbers in its step ({func}), so weights would depend on "
                "pipeline.K: draw them in a layer or in the loss, or choose another optimizer"
            )
        return func(*args, **(kwargs or {}))


class Updater:
    """Turns the gradients of a mini-batch into an update, and saves and restores the state of all that takes part.

    Args:
        pipeline: the pipeline, with this worker's cells.
        optimizer: updates the cells' parameters.
        lr_schedule: the optimizer's schedule, before its first step.
        average: moving average of the weights; None: the run keeps none.
        clip: the largest norm of the whole gradient; None: no limit.
        shards: divides the optimizer's state among the replicas; None: each has all of it.

    Attributes:
        is_offloaded: True if the cells' state lies in a file or the host's memory; they are then updated in turn.
        begin_sums: begins to sum a cell's gradients over the replicas, by the cell's number, while other cells run;
            None where sums do not run beside computations, and with offload.
    """

    def __init__(
        self,
        pipeline: WorkerPipeline,
        optimizer: torch.optim.Optimizer,
        lr_schedule: LRScheduler,
        average: WeightAverage | None,
        clip: float | None,
        shards: OptimizerShards | None = None,
    ) -> None:
        self.optimizer, self._shards = optimizer, shards
        self._lr_schedule, self._average, self._clip = lr_schedule, average, clip
        cells, self._ties, self._replica_group = pipeline.cells, pipeline.ties, pipeline.world.replica_group
        self._layers, self._unused = pipeline.layers, pipeline.unused
        self._cells, self._has_stepped = cells, False
        self._parameters = pipeline.parameters()
        self.is_offloaded = any(cell.state for cell in cells)
        self._batchnorms = [batchnorm for cell in cells for batchnorm in cell.batchnorms]
        self._sums = None if self._replica_group is None else ReplicaSums(self._replica_group)
        sums_early = pipeline.world.sums_beside_computations and not self.is_offloaded
        self.begin_sums = self._begin_sums if sums_early else None
        tied = self._ties.own
        self._of_cell = {cell.number: [p for _, p in cell.parameters() if p not in tied] for cell in cells}

    def take_away(self) -> None:
        """Gives the memory of all offloaded cells back."""
        for cell in self._cells:
            self._take_away(cell)

    @property
    def learning_rate(self) -> float:
        """Returns the learning rate of the optimizer's first group."""
        return float(self._lr_schedule.get_last_lr()[0])

    def _begin_sums(self, cell: int) -> None:
        """Begins to sum a cell's gradients over the replicas; those of tied parameters are not whole yet."""
        assert self._sums is not None  # there are replicas
        self._unused.fill(self._of_cell[cell])
        self._sums.begin(self._of_cell[cell])

    def reduce_gradients(self, scale: float = 1.0) -> None:
        """Sums the gradients over the uses of tied parameters and over the replicas.

        Unused parameters have a gradient of zero until the workers have exchanged which were used.

        Args:
            scale: factor by which all gradients are too large.
        """
        for cell in self._cells:
            if cell.state is not None:
                cell.state.synchronize()
        self._unused.fill(self._parameters)
        if self._ties.ties:
            self._unused.owners = self._ties.add_gradients()
        for parameters in self._portions():
            if self._sums is not None:
                self._sums.finish(parameters)
            scale_gradients(parameters, 1 / scale)

    def squared_norms(self) -> Tensor:
        """Returns the squared norm of each parameter's gradient."""
        if not self.is_offloaded:
            return squared_norms(self._parameters)
        # One by one, because tied parameters stay on a GPU and the others' gradients do not.
        norms = [squared_norms([parameter]).cpu() for parameters in self._portions() for parameter in parameters]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *norms])

    def _portions(self) -> Iterator[Sequence[nn.Parameter]]:
        """Yields all parameters at once or, with offload, those of one cell after another.

        The memory of an offloaded cell is given back before the next one.
        """
        if not self.is_offloaded:
            yield self._parameters
            return
        for cell in self._cells:
            yield [parameter for _, parameter in cell.parameters()]
            self._take_away(cell)

    def update(self, result: StepResult, updates_before: int) -> None:
        """Applies the gradients and clears them. If the step is not finite, only the learning rate moves on.

        Args:
            result: result of the step, the same on all workers.
            updates_before: number of updates before this one, without those skipped.
        """
        if result.finite:
            self._take_step(clip_factor(result.gradient_norm, self._clip))
            if self._shards is not None:
                self._shards.spread()
            if self._ties.ties:
                self._ties.spread()
            if self._batchnorms:
                finish_batchnorm(self._batchnorms, self._replica_group)
            if self._average is not None:
                self._average.update(updates_before)
        self._lr_schedule.step()
        self.forget_step()

    def _take_step(self, factor: float) -> None:
        """Multiplies the gradients by a factor and takes a step of the optimizer; with offload cell by cell.

        Raises:
            ConfigurationError: it draws random numbers in its first step, which would be others for another cut.
        """
        groups = self.optimizer.param_groups
        given = [dict(group) for group in groups]
        watched = nullcontext() if self._has_stepped else NoDraws()  # type: ignore[no-untyped-call]  # torch's own
        for parameters in self._portions():
            scale_gradients(parameters, factor)
            if self.is_offloaded:
                own = set(parameters)
                for group, values in zip(groups, given, strict=True):
                    group.update(values, params=[p for p in values["params"] if p in own])  # each cell counts anew
            with watched:
                self.optimizer.step()
        self._has_stepped = True
        for group, values in zip(groups, given, strict=True):
            group["params"] = values["params"]

    def forget_step(self) -> None:
        """Clears the gradients, and the BatchNorm statistics of a step that is not applied."""
        for batchnorm in self._batchnorms:
            batchnorm.take_gathered()
        for parameter in self._parameters:
            parameter.grad = None
        if self._ties.ties:
            self._ties.forget_gradients()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Makes the layers hold their averages while the context lasts, where the run keeps them."""
        if self._average is None:
            yield
            return
        with self._average.in_place_of_weights():
            self._ties.spread()
            yield
        self._ties.spread()

    # -- checkpoints -------------------------------------------------------------------------------------------

    def layer_states(self, keep: bool = True) -> dict[str, LayerState]:
        """Returns weights, buffers, optimizer state and averages of this worker's layers by name.

        All replicas call it at the same time.

        Args:
            keep: False if only other replicas need the result; then nothing is returned here.
        """
        state: dict[Any, Any] = self.optimizer.state
        others = {} if self._shards is None else self._shards.state_of_others(state, keep)
        state.update(others)
        try:
            own = {}
            for layer in self._layers if keep else ():
                average = None if self._average is None else self._average.of(layer.name)
                own[layer.name] = layer_state(layer.module, self.optimizer, average, layer.tied)
            return own
        finally:
            for parameter in others:
                del state[parameter]

    def restore_layers(self, info: CheckpointInfo, keep_memory: bool) -> None:
        """Puts weights, buffers, averages and optimizer state of a checkpoint back.

        Args:
            keep_memory: True to restore the optimizer's state, too; False: the optimizer begins without state.

        Raises:
            CheckpointError: a file of the checkpoint is damaged, or something in it does not fit this run.
        """
        cell_of = {layer.name: cell for cell in self._cells for layer in cell.layers}
        for layer in self._layers:
            state = load_layer(info, layer.name)
            try:
                restore_layer(
                    layer.name, layer.module, self.optimizer, state if keep_memory else replace(state, optimizer={})
                )
                if self._average is not None:
                    own = {name: value for name, value in state.averages.items() if name not in layer.tied}
                    self._average.restore(layer.name, own)
            except CheckpointError as error:
                raise CheckpointError(f"{info.path}: {error}") from None
            self._take_away(cell_of[layer.name])

    def _take_away(self, cell: Cell) -> None:
        """Gives the memory of an offloaded cell back, with what the optimizer keeps of it."""
        if cell.state is not None:
            cell.state.keep(self.optimizer.state)
        cell.take_away()

    def restore_lr(self, step: int) -> None:
        """Brings the learning rate schedule to a step, with the rates of the present configuration."""
        replay(self._lr_schedule, step)


def replay(lr_schedule: LRScheduler, steps: int) -> None:
    """Takes so many steps of a new schedule, which sets the groups' learning rates, and may set momenta and betas."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there were no updates in between
        for _ in range(steps):
            lr_schedule.step()
