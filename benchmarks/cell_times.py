"""Compares the layers' times that a plan is made of with the engine's, in turns in the same processes.

The time of a cell in gpipe-plan with plan.device=this is the sum of what `profile_layers` measures for its layers, and
for the task's loss in the last cell, while other processes keep the other cores busy. Here the first worker of a
pipeline times the layers in that way, then all workers run some training steps, and so on: a machine whose speed varies
by a fifth from minute to minute disturbs both alike, unlike in `benchmarks.plan`, where plans and runs are commands of
their own. A step's time of a cell is its meter's time of one micro-batch: forward, recompute (where there is any) and
backward. Shown are the medians over the rounds, and the median of each round's ratio with its quartiles. Use at most as
many workers as there are free cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common import Row, report
from benchmarks.plan import COLUMNS, KINDS, cell_rows, comparison, configurations, medians
from gpipe_cli.bench.steps import CPU, EngineStep, engine_step
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.commands.plan import make_request
from gpipe_cli.distributed.runtime import make_transport
from gpipe_cli.distributed.world import join_world
from gpipe_cli.factory.build import build_autocast, build_model, build_task
from gpipe_cli.factory.cut import build_cells, cut_model
from gpipe_cli.factory.example import example_micro_batch
from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.partition.layer_times import LayerTimes, cell_total
from gpipe_cli.partition.profile import profile_layers
from gpipe_cli.planner.measure.background_load import background_load


def worker(context: Context, config: Mapping[str, Any]) -> list[list[list[Row]]]:
    """Returns for each cell, by round, the rows of the table; there are as many workers as cells."""
    settings = make_request(config["words"]).settings
    pipeline = settings.pipeline
    world = join_world(context, context.world_size, 1, "cpu", pipeline.backend)
    builders, task = build_model(settings.model), build_task(settings.task)
    (inputs, targets), _ = example_micro_batch(settings.data, pipeline.M, False)
    # Ones, as in a plan, are valid tokens, labels and pixels.
    inputs, targets = (tuple(torch.ones_like(tensor, device=CPU) for tensor in side) for side in (inputs, targets))
    cut = cut_model(builders, pipeline, world.workers, (inputs, targets))
    cells = build_cells(builders, cut, world, settings, context.where)
    (mine,) = cells
    mine.train(True)
    micro_batches = [(inputs, targets)] * pipeline.M
    transport, how = make_transport(world, cut.placement), (pipeline.schedule, pipeline.remat)
    step = engine_step(cells, cut.placement, world.worker, transport, micro_batches, *how, task.loss)
    autocast = build_autocast(settings.precision, CPU)

    def loss(outputs: Tensors) -> torch.Tensor:
        return task.loss(outputs, targets)[0]

    def profile() -> list[dict[str, float]]:
        with background_load(world.size - 1, pipeline.threads):
            found = profile_layers(builders, inputs, CPU, autocast, loss, targets)
        return [asdict(times) for times in (*found.times, found.loss) if times is not None]

    rounds = []
    for _ in range(config["rounds"]):
        times = planned_times([LayerTimes(**each) for each in world.broadcast(profile)], cut.layers[mine.number])
        planned = {kind: getattr(times, field) for kind, field in KINDS[pipeline.remat].items()}
        rounds.append(list(cell_rows(mine.number, planned, measured_steps(step, config["steps"]), pipeline.M)))
    return world.all_gather(rounds)


def planned_times(times: Sequence[LayerTimes], layers: range) -> LayerTimes:
    """Returns the times of one cell, as a plan adds them up; the last of ``times`` are those of the task's loss."""
    *model, loss = times
    return cell_total([model[layer] for layer in layers], [loss] if layers.stop == len(model) else [])


def measured_steps(step: EngineStep, steps: int) -> list[dict[str, float]]:
    """Returns the seconds of this worker's cell by kind of instruction, of each step after a warm-up step."""
    taken = []
    for _ in range(1 + steps):
        step()
        taken.append({op.name.lower(): seconds for (op, _), seconds in step.engine.meter.seconds().items()})
    return taken[1:]


def main() -> None:
    arguments = comparison(__doc__, steps=4, rounds=15)

    def rows() -> Iterator[Row]:
        for name, words in configurations(arguments):
            settings = make_request(words).settings
            config = {"words": words, "steps": arguments.steps, "rounds": arguments.rounds}
            for rounds in run_workers("benchmarks.cell_times:worker", settings.pipeline.K, config):
                yield from ({**name, **row} for row in medians(rounds))

    report({**COLUMNS, "quartiles": ""}, rows(), arguments.output, notes)


def notes(rows: Sequence[Row]) -> list[str]:
    cells = [row for row in rows if row["what"].startswith("all of it")]
    near = [row for row in cells if abs(row["planned / measured"] - 1) <= 0.1]
    return [f"within 10 % of the measured time: {len(near)} of {len(cells)} cells"]


if __name__ == "__main__":
    main()
