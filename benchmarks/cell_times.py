"""The times of layers that a plan is made of, beside those that the engine takes, in turns in the same processes.

What gpipe-plan with plan.device=this says of a cell is the sum of what `profile_layers` finds for its layers, and for
the task's loss in the last, while other processes keep the other cores busy. Here the first worker of a pipeline times
the layers so, then all of them take some training steps, and so on: a machine that wavers by a fifth from minute to
minute disturbs both alike, which it does not in `benchmarks.plan`, where plans and runs are commands of their own. A
step's time of a cell is what its meter says of one micro-batch: forward, recompute (where there is any) and backward.
Shown are the medians over the rounds, and the median of each round's ratio with its quartiles. Give at most as many
workers as there are free cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common import Report
from benchmarks.plan import COLUMNS, cell_rows, comparison, configurations, kinds_of_work, medians
from gpipe_cli.bench.driver import EngineStep, step_of_cells
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.commands.plan import make_request
from gpipe_cli.config import Settings
from gpipe_cli.distributed.world import join_world
from gpipe_cli.factory.build import build_autocast, build_cells, build_model, build_task, cut_model
from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.partition.layer_times import LayerTimes, cell_total
from gpipe_cli.partition.profile import ModelProfile, profile_layers
from gpipe_cli.planner.measure.background_load import background_load
from gpipe_cli.planner.measure.example import example_micro_batch
from gpipe_cli.trainer.assembly import make_transport

CPU = torch.device("cpu")


def worker(context: Context, config: Mapping[str, Any]) -> list[list[list[dict[str, Any]]]]:
    """Entry point: for each cell, by round, the rows of the table; as many workers as cells."""
    settings = Settings.from_config(config["settings"])
    pipeline = settings.pipeline
    world = join_world(context, context.world_size, 1, "cpu", pipeline.backend)
    builders, task = build_model(settings.model), build_task(settings.task)
    (inputs, targets), _ = example_micro_batch(settings.data, pipeline.M, False)
    # Ones, as in a plan, may stand for tokens, labels and pixels.
    inputs, targets = (tuple(torch.ones_like(tensor, device=CPU) for tensor in side) for side in (inputs, targets))
    cut = cut_model(builders, pipeline, world.workers, (inputs, targets))
    cells = build_cells(builders, cut, world, 1, False)
    (mine,) = cells
    mine.train(True)
    micro_batches = [(inputs, targets)] * pipeline.M
    engine = (cut.placement, world.worker, make_transport(world, cut), micro_batches, pipeline.schedule, pipeline.remat)
    step = step_of_cells(cells, *engine, task.loss)
    autocast = build_autocast(settings.precision, CPU)

    def loss(outputs: Tensors) -> torch.Tensor:
        return task.loss(outputs, targets)[0]

    def profile() -> ModelProfile:
        with background_load(world.size - 1, pipeline.threads):
            return profile_layers(builders, inputs, CPU, autocast, loss, targets)

    rounds = []
    for _ in range(config["rounds"]):
        times = planned_times(world.broadcast(profile), cut.layers[mine.number])
        said = {what: getattr(times, key) for what, key in kinds_of_work(pipeline.remat).items()}
        rounds.append(list(cell_rows(mine.number, said, measured_steps(step, config["steps"]), pipeline.M)))
    return world.all_gather(rounds)


def planned_times(profile: ModelProfile, layers: range) -> LayerTimes:
    """Of one cell, as a plan adds them up."""
    loss = [profile.loss] if profile.loss is not None and layers.stop == len(profile.times) else []
    return cell_total([profile.times[layer] for layer in layers], loss)


def measured_steps(step: EngineStep, steps: int) -> list[dict[str, float]]:
    """Seconds of this worker's cell by kind of instruction, of each step after one that does not count."""
    taken = []
    for _ in range(1 + steps):
        step()
        taken.append({op.name.lower(): seconds for (op, _), seconds in step.engine.meter.seconds().items()})
    return taken[1:]


def main() -> None:
    arguments = comparison(__doc__, steps=4, rounds=15)
    report = Report({**COLUMNS, "quartiles": ""})
    report.begin()
    for name, words in configurations(arguments):
        settings = make_request(words).settings
        config = {"settings": asdict(settings), "steps": arguments.steps, "rounds": arguments.rounds}
        for rounds in run_workers("benchmarks.cell_times:worker", settings.pipeline.K, config):
            for row in medians(rounds):
                report.add({**name, **row})
    cells = [row for row in report.rows if row["what"].startswith("all of it")]
    near = [row for row in cells if abs(row["planned / measured"] - 1) <= 0.1]
    report.end(arguments.output, [f"within 10 % of the measured time: {len(near)} of {len(cells)} cells"])


if __name__ == "__main__":
    main()
