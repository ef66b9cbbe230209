"""Plants faults in how a run begins, goes on from a checkpoint, and is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gpipe_cli.checkpoint import transfer
from gpipe_cli.factory import cut
from gpipe_cli.optim.average import WeightAverage
from gpipe_cli.pipeline import cell as cells
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.trainer import batches
from gpipe_cli.trainer import update as weight_update
from gpipe_cli.trainer.evaluator import Evaluator
from gpipe_cli.trainer.update import Updater

from .fault import fault, replaced

Patch = AbstractContextManager[Any]

# -- initial weights ---------------------------------------------------------------------------------------------------


@fault(r"layer mix_3 \(cell 2\)", "before any training.*other weights")
def other_weights_in_one_layer() -> Patch:
    """Draws the weights of one layer by another seed."""
    return replaced(cut, "build_layer", lambda make, b, i, seed, device: make(b, i, seed + (i == 5), device))


@fault("layer mix_0", "before any training.*weights")
def weights_ignore_the_layer() -> Patch:
    """Draws the same weights for layers of the same kind, on both sides."""
    return replaced(cells, "weights_of_layer", lambda draw, seed, layer: draw(seed, 0))


@fault("layer embed", "before any training.*weights")
def weights_ignore_the_seed() -> Patch:
    """Draws the same weights whatever the seed of the run, on both sides."""
    return replaced(cells, "weights_of_layer", lambda draw, seed, layer: draw(0, layer))


@fault("replica 1", "weights", replicas=2)
def replica_begins_elsewhere() -> Patch:
    """Draws the weights of one layer by another seed in replica 1."""

    def build(make: Any, builders: Any, found: Any, world: Any, *rest: Any) -> Any:
        def draw(one: Any, b: Any, i: int, seed: int, device: Any) -> Any:
            return one(b, i, seed + (world.replica == 1 and i == 4), device)

        with replaced(cut, "build_layer", draw):
            return make(builders, found, world, *rest)

    from gpipe_cli.trainer import assembly

    return replaced(assembly, "build_cells", build)


# -- resume ------------------------------------------------------------------------------------------------------------


@fault("mix_3", "resume|checkpoint")
def resumed_with_another_layer() -> Patch:
    """Restores a layer from the file of another one of the same shape."""

    def load(function: Any, info: Any, name: str) -> Any:
        return function(info, "mix_2" if name == "mix_3" else name)

    return replaced(weight_update, "load_layer", load)


@fault("optimizer|exp_avg", "resume|checkpoint")
def resumed_without_momenta() -> Patch:
    """Restores the weights and no state of the optimizer."""

    def restore(function: Any, name: str, module: Any, optimizer: Any, *state: Any) -> None:
        function(name, module, None, *state)

    return replaced(weight_update, "restore_layer", restore)


@fault("every cell", "learning rate.*that of step 1", "lr_schedule.warmup_steps=20")
def resumed_with_the_first_rate() -> Patch:
    """Begins the learning rate schedule anew in a resumed run."""
    from gpipe_cli.checkpoint.lr_schedule_state import LRScheduleState

    return replaced(LRScheduleState, "restore", lambda function, state, saved: None)


@fault("layer embed", "other data.*resume|resume.*other data")
def resumed_at_another_batch() -> Patch:
    """Reads the data of a resumed run from one mini-batch too far."""

    def further(read: Any, source: Any, position: Any, *rest: Any) -> Any:
        return read(source, None if position is None else position + 1, *rest)

    return replaced(batches, "training_batches", further)


@fault("average", "resume|checkpoint", "trainer.average=0.9")
def resumed_without_averages() -> Patch:
    """Begins the averages of a resumed run with its weights."""
    return replaced(WeightAverage, "restore", lambda function, average, layer, saved: function(average, layer, {}))


@fault("norm", "resume|checkpoint")
def resumed_without_buffers() -> Patch:
    """Restores the weights and not BatchNorm's moving averages."""

    def restore(function: Any, name: str, module: Any, *state: Any) -> None:
        buffers = {key: buffer.clone() for key, buffer in module.named_buffers()}
        function(name, module, *state)
        for key, buffer in module.named_buffers():
            buffer.copy_(buffers[key])

    return replaced(weight_update, "restore_layer", restore)


@fault("mix_2", "init_from|other weights", "checkpoint.init_from=@")
def transfer_leaves_a_layer_out() -> Patch:
    """Leaves one layer as it was drawn when weights are taken from another run."""

    def load(function: Any, name: str, *state: Any) -> None:
        if name != "mix_2":
            function(name, *state)

    return replaced(transfer, "restore_layer", load)


# -- evaluation --------------------------------------------------------------------------------------------------------


@fault(r"layer mix_0 \(cell 0\)", "not in evaluation mode")
def evaluated_in_training_mode() -> Patch:
    """Leaves dropout and BatchNorm in training mode during an evaluation."""

    def evaluate(function: Any, evaluator: Evaluator, final: bool) -> Any:
        with replaced(Cell, "train", lambda train, cell, training: None):
            return function(evaluator, final)

    return replaced(Evaluator, "evaluate", evaluate)


@fault(r"layer mix_2 \(cell 2\)", "not in evaluation mode")
def one_cell_evaluated_in_training_mode() -> Patch:
    """Leaves dropout of cell 2 on during an evaluation."""

    def train(function: Any, cell: Cell, training: bool) -> None:
        function(cell, training or cell.number == 2)

    return replaced(Cell, "train", train)


@fault("evaluation", "left out")
def last_evaluation_batch_left_out() -> Patch:
    """Leaves the last mini-batch out of an evaluation."""

    def fewer(read: Any, *arguments: Any) -> Iterator[Any]:
        every = list(read(*arguments))
        return iter(every[:-1])

    from gpipe_cli.trainer import evaluator

    return replaced(evaluator, "evaluation_batches", fewer)


@fault("layer embed", "evaluation.*has changed", "trainer.average=0.9")
def averages_stay_after_an_evaluation() -> Patch:
    """Leaves the averages in the layers when an evaluation ends."""

    @contextmanager
    def exchange(average: WeightAverage) -> Iterator[None]:
        average._exchange()
        yield

    return replaced(WeightAverage, "in_place_of_weights", lambda function, average: exchange(average))


@fault("layer embed", "in place of their averages", "trainer.average=0.9")
def weights_evaluated_in_place_of_averages() -> Patch:
    """Evaluates the weights where their averages are asked for."""
    from contextlib import nullcontext

    return replaced(Updater, "averaged_weights", lambda function, updater: nullcontext())
