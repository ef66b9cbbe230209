"""A small model for gpipe-verify, and faults to plant in the engine and the trainer. Run as a script it is the command.

As a script it plants the fault that the environment variable FAULT names in every worker.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from small_models import WIDTH, Mix, mini_batch, small_model, token_loss, weight_of
from torch import Tensor, nn

from gpipe_cli.commands.train import main
from gpipe_cli.commands.verify import conclude
from gpipe_cli.data.source import Batch
from gpipe_cli.distributed import runtime
from gpipe_cli.jobs.job import EntryPoint
from gpipe_cli.launch.context import Context
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.engine import StepInput, _TrainingStep
from gpipe_cli.schedule.instruction import Instruction
from gpipe_cli.trainer import update as weight_update
from gpipe_cli.trainer.loop import Trainer
from gpipe_cli.verify import run as verify

EXAMPLES = 16


# -- what is trained -----------------------------------------------------------------------------------------------


def layers(batchnorm: bool = True, dropout: float = 0.2, odd: str = "") -> list[LayerBuilder]:
    """Returns embed, mix_0, norm, judge, mix_2, mix_3, head; ``odd`` replaces mix_3."""
    builders = small_model(batchnorm, dropout)
    if odd:
        builders[-2] = LayerBuilder(odd, {"counter": Counter, "moody": Moody, "dice": Dice}[odd])
    return builders


class Counter(Mix):
    """Changes a buffer of its own in every forward."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.calls += 1
        return super().forward(inputs)


class Moody(Mix):
    """Gives something else whenever it is called: its scale depends on how often that was."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.scale, self.calls = nn.Parameter(torch.ones(WIDTH)), 0

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.calls += 1
        x, *rest = super().forward(inputs)
        return x * self.scale * (1 + 0.01 * ((self.calls - 1) // 4 % 2)), *rest  # M = 4 forwards, then 4 recomputes


class Dice(Mix):
    """Draws random numbers that are not torch's."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = super().forward(inputs)
        return x * (1 + random.random()), *rest


class Words:
    """Yields rows of token ids whose width changes from step to step."""

    def __init__(self, batch_size: int = EXAMPLES) -> None:
        self.batch_size = batch_size

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        for number in range(position or 0, 100):
            everything = mini_batch(number, self.batch_size, M * replicas)
            yield Batch(everything[replica * M : (replica + 1) * M], number + 1)

    def evaluation(self, M: int) -> Iterator[Batch]:
        yield Batch(mini_batch(0, self.batch_size, M), 1)


class Tokens:
    """Computes the loss, as a task."""

    statistics = ("tokens", "all_tokens")
    metrics = ("nll",)
    unit = "tokens"

    def weight(self, targets: tuple[Tensor, ...]) -> float:
        return weight_of([(targets, targets)])

    def loss(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        loss, tokens = token_loss(outputs, targets)
        return loss, torch.cat([tokens, tokens])

    def evaluate(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        return token_loss(outputs, targets)[0].double()[None]

    def summarize(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        return {"nll": sums["nll"] / weight}


WORDS = (
    *("model._target_=verify_jobs.layers", "data._target_=verify_jobs.Words", "task._target_=verify_jobs.Tokens"),
    *(f"data.batch_size={EXAMPLES}", "pipeline.K=4", "pipeline.M=4", "pipeline.partition=[2,2,2,1]"),
    *("optimizer=adam", "lr_schedule=constant", "optimizer.lr=0.01", "trainer.gradient_clip=0.05"),
)  # cell 0: embed, mix_0; cell 1: norm, judge; cell 2: mix_2, mix_3; cell 3: head

# -- faults --------------------------------------------------------------------------------------------------------

Fault = Callable[[], AbstractContextManager[Any]]


def scaled_by_m() -> AbstractContextManager[Any]:
    """As if every micro-batch's loss were a mean and nobody divided by M."""

    def scaled(step: int, steps: int, signatures: Any, scale: float) -> StepInput:
        return StepInput(step, steps, signatures, scale * 4)

    return mock.patch.object(runtime, "StepInput", scaled)


def _run_training(change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """``change(run, cell, inputs, targets, step, micro_batch, signature, first_time)`` in place of a cell's run."""
    run = Cell.run_training
    return mock.patch.object(Cell, "run_training", lambda *arguments: change(run, *arguments))


def wrong_seed_in_recompute() -> AbstractContextManager[Any]:
    return _run_training(lambda run, c, x, y, step, m, s, first: run(c, x, y, step + 7 * (not first), m, s, first))


def wrong_seed_in_forward() -> AbstractContextManager[Any]:
    return _run_training(lambda run, c, x, y, step, m, s, first: run(c, x, y, step + 7 * (c.number == 2), m, s, first))


def batchnorm_counted_twice() -> AbstractContextManager[Any]:
    return _run_training(lambda run, c, x, y, step, m, s, first: run(c, x, y, step, m, s, True))


def stale_weights() -> AbstractContextManager[Any]:
    """Cell 2 runs each step with the weights that it had before the last update."""
    kept: dict[int, list[Tensor]] = {}

    def change(run: Any, cell: Cell, x: Any, y: Any, step: int, *rest: Any) -> Any:
        parameters = [parameter for _, parameter in cell.parameters()]
        kept.setdefault(step, [parameter.detach().clone() for parameter in parameters])
        if cell.number != 2 or step == 0:
            return run(cell, x, y, step, *rest)
        now = [parameter.data for parameter in parameters]
        for parameter, old in zip(parameters, kept_of_cell_2[step - 1], strict=True):
            parameter.data = old
        try:
            return run(cell, x, y, step, *rest)
        finally:
            for parameter, new in zip(parameters, now, strict=True):
                parameter.data = new

    kept_of_cell_2: dict[int, list[Tensor]] = {}

    def remembering(run: Any, cell: Cell, x: Any, y: Any, step: int, *rest: Any) -> Any:
        if cell.number == 2 and step not in kept_of_cell_2:
            kept_of_cell_2[step] = [parameter.detach().clone() for _, parameter in cell.parameters()]
        return change(run, cell, x, y, step, *rest)

    return _run_training(remembering)


def boundary_gradient_dropped() -> AbstractContextManager[Any]:
    """Drops the gradient that comes back to cell 1 for micro-batch 2."""
    take = _TrainingStep._take_output_gradients

    def dropping(step: _TrainingStep, i: Instruction) -> tuple[Tensor, ...]:
        gradients = take(step, i)
        return tuple(torch.zeros_like(g) for g in gradients) if (i.cell, i.micro_batch) == (1, 2) else gradients

    return mock.patch.object(_TrainingStep, "_take_output_gradients", dropping)


def _before_update(change: Callable[[Trainer], None]) -> AbstractContextManager[Any]:
    update = Trainer._update

    def changed(trainer: Trainer, report: Any) -> None:
        change(trainer)
        update(trainer, report)

    return mock.patch.object(Trainer, "_update", changed)


def _parameters(trainer: Trainer, cell: int) -> list[nn.Parameter]:
    cells = trainer.runtime.engine.cells
    return [p for _, p in cells[cell].parameters()] if cell in cells else []


def optimizer_state_lost() -> AbstractContextManager[Any]:
    """Deletes the optimizer's state of cell 3 before the second update."""

    def forget(trainer: Trainer) -> None:
        for parameter in _parameters(trainer, 3):
            trainer.updater.optimizer.state.pop(parameter, None)

    return _before_update(forget)


def cell_not_updated() -> AbstractContextManager[Any]:
    def lose(trainer: Trainer) -> None:
        for parameter in _parameters(trainer, 1):
            parameter.grad = None

    return _before_update(lose)


def clipping_forgotten() -> AbstractContextManager[Any]:
    return mock.patch.object(weight_update, "scale_gradients", lambda parameters, factor: None)


def averages_never_updated() -> AbstractContextManager[Any]:
    return mock.patch.object(
        weight_update, "finish_batchnorm", lambda layers, replicas: [x.take_pooled() for x in layers]
    )


def replicas_not_added_up() -> AbstractContextManager[Any]:
    return mock.patch.object(weight_update, "reduce_over_replicas", lambda parameters, group: None)


def other_weights_in_one_layer() -> AbstractContextManager[Any]:
    """Layer 5 begins with the weights of another seed."""
    from gpipe_cli.factory import cut

    make = cut.build_layer
    return mock.patch.object(cut, "build_layer", lambda b, i, seed, device: make(b, i, seed + (i == 5), device))


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plants the fault inside the context; "" plants none. It must not touch the plain loop."""
    if not name:
        yield
        return
    fault: Fault = globals()[name]
    with fault():
        yield


def verify_with_fault(context: Context, config: dict[str, Any]) -> dict[str, Any] | None:
    """Entry point of a worker."""
    with planted(os.environ.get("FAULT", "")):
        return verify.main(context, config)


if __name__ == "__main__":
    program = EntryPoint("verify_jobs:verify_with_fault", ("torch", "gpipe_cli.verify.run"), conclude, "verify")
    sys.exit(main([*WORDS, *sys.argv[1:]], program))
