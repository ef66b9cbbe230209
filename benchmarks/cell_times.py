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

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Report, parser
from benchmarks.plan import CUT, MODELS, REMATS
from gpipe_cli.bench.driver import EngineStep, step_of_cells
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.commands.plan import make_request
from gpipe_cli.config import Settings
from gpipe_cli.launch.context import Context
from gpipe_cli.pipeline.boundary import Tensors
from gpipe_cli.pipeline.cost import Profile, profile_layers
from gpipe_cli.pipeline.layer_times import total_times
from gpipe_cli.planner.example import example_part
from gpipe_cli.planner.neighbours import Neighbours
from gpipe_cli.trainer.assembly import make_transport
from gpipe_cli.trainer.build import build_autocast, build_cells, build_model, build_task, cut_model
from gpipe_cli.trainer.world import join_world

CPU = torch.device("cpu")
Times = dict[str, float]  # seconds of each kind of work


def worker(context: Context, config: Mapping[str, Any]) -> list[list[dict[str, Times]]]:
    """Entry point: for each cell, by round, what was `planned` for it and `measured`; as many workers as cells."""
    world = join_world(context, context.world_size, 1, "cpu", "gloo")
    settings = Settings.from_config(config["settings"])
    pipeline = settings.pipeline
    builders, task = build_model(settings.model), build_task(settings.task)
    (inputs, targets), _ = example_part(settings.data, pipeline.M, False)
    # Ones, as in a plan, may stand for tokens, labels and pixels.
    inputs, targets = (tuple(torch.ones_like(tensor, device=CPU) for tensor in side) for side in (inputs, targets))
    cut = cut_model(builders, pipeline, world.workers, (inputs, targets), CPU)
    cells = build_cells(builders, cut, world, 1, False)
    (mine,) = cells
    mine.train(True)
    parts = [(inputs, targets)] * pipeline.M
    engine = (cut.placement, world.worker, make_transport(world, cut), parts, pipeline.schedule, pipeline.remat)
    step = step_of_cells(cells, *engine, task.loss)
    autocast = build_autocast(settings.precision, CPU)

    def loss(outputs: Tensors) -> torch.Tensor:
        return task.loss(outputs, targets)[0]

    others = Neighbours(world.size - 1 if world.rank == 0 else 0, pipeline.threads)
    rounds = []
    for _ in range(config["rounds"]):
        profiles: list[Any] = [None]
        if world.rank == 0:
            with others.busy():
                profiles[0] = profile_layers(builders, inputs, CPU, autocast, loss, targets)
        dist.broadcast_object_list(profiles)
        planned = planned_times(profiles[0], cut.layers[mine.number], pipeline.remat == "always")
        rounds.append({"planned": planned, "measured": measured_times(step, config["steps"], pipeline.M)})
    return world.gather_everyone(rounds)  # type: ignore[no-any-return]  # torch's own annotation


def planned_times(profile: Profile, layers: range, recomputes: bool) -> Times:
    """Of one cell and micro-batch, as a plan adds them up."""
    model = [profile.times[layer] for layer in layers]
    scored = total_times(model + ([profile.loss] if profile.loss and layers.stop == len(profile.times) else []))
    if recomputes:  # a forward without a graph leaves the loss to the run that counts
        forward = total_times(model).inference
        return {"forward": forward, "recompute": scored.recompute, "backward": scored.backward}
    return {"forward": scored.forward, "backward": scored.backward}


def measured_times(step: EngineStep, steps: int, M: int) -> Times:
    """Of this worker's cell and one micro-batch: medians over the steps, after one that does not count."""
    taken = []
    for number in range(1 + steps):
        step()
        if number:
            seconds = step.engine.meter.seconds()
            taken.append({op.name.lower(): spent / M for (op, _), spent in seconds.items()})
    return {what: statistics.median(each[what] for each in taken) for what in taken[0]}


def rows_of(cell: int, rounds: Sequence[Mapping[str, Times]]) -> list[dict[str, Any]]:
    """One for each kind of work, and one for all of it."""
    kinds = tuple(rounds[0]["planned"])  # messages and waiting, which a meter also knows, are no work of a cell
    rows = []
    for what, parts in {**{kind: (kind,) for kind in kinds}, "all of it": kinds}.items():
        planned, measured = (
            [sum(found[side][part] for part in parts) for found in rounds] for side in ("planned", "measured")
        )
        ratios = [said / took for said, took in zip(planned, measured, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        row = {"cell": cell, "what": f"{what}, ms", "planned": 1e3 * statistics.median(planned)}
        row |= {"measured": 1e3 * statistics.median(measured), "planned / measured": middle}
        rows.append({**row, "quartiles": f"{low:.2f} … {high:.2f}", "ratios": ratios})
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=4, help="of each round that count (default: 4)")
    options.add_argument("--rounds", type=int, default=15, help="times the layers, takes the steps (default: 15)")
    options.add_argument("--models", default=",".join(MODELS), help="(default: %(default)s)")
    options.add_argument("--remats", default=",".join(REMATS), help="(default: %(default)s)")
    options.add_argument("overrides", nargs="*", help=f"of the configuration; default: {' '.join(CUT)}")
    arguments = options.parse_args()
    models, remats = arguments.models.split(","), arguments.remats.split(",")
    if arguments.quick:
        models, remats, arguments.rounds = models[:1], remats[:1], 2
    columns = {"model": "", "remat": "", "cell": "d", "what": "", "planned": ".2f", "measured": ".2f"}
    report = Report({**columns, "planned / measured": ".3f", "quartiles": ""})
    report.begin()
    for model, remat in product(models, remats):
        settings = make_request([*MODELS[model], *CUT, f"pipeline.remat={remat}", *arguments.overrides]).settings
        config = {"settings": asdict(settings), "steps": arguments.steps, "rounds": arguments.rounds}
        found = run_workers("benchmarks.cell_times:worker", settings.pipeline.K, config)
        for cell, rounds in enumerate(found):
            for row in rows_of(cell, rounds):
                report.add({"model": model, "remat": remat, **row})
    cells = [row for row in report.rows if row["what"].startswith("all of it")]
    near = [row for row in cells if abs(row["planned / measured"] - 1) <= 0.1]
    report.end(arguments.output, [f"within 10 % of the measured time: {len(near)} of {len(cells)} cells"])


if __name__ == "__main__":
    main()
