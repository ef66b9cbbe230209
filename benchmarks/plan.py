"""Compares gpipe-plan's times of cells and its bubble with a run on the same machine.

For each model and remat policy: runs gpipe-plan with plan.device=this, then in each round gpipe-train and gpipe-plan
again. The machine's speed varies from minute to minute, and with it plans and runs: each run is compared with the mean
of the plans before and after it, and the median over the rounds is shown. A measured time is the median over the steps
of a cell's seconds for one micro-batch: forward, recompute (where there is any) and backward. Both models have
micro-batches of one shape, as a plan has. Use at most as many workers as there are free cores, because several on one
core take turns. Further arguments go to both commands: `python -m benchmarks.plan pipeline.M=8`.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.common import Row, parser, report, run_command

MODELS = {
    "transformer_lm_small": ("model=transformer_lm_small",),
    "amoebanet": ("model=amoebanet", "lr_schedule.warmup_steps=1"),  # on the digits
}
REMATS = ("never", "always")
CUT = ("pipeline.K=2", "pipeline.M=4")
RUN = ("trainer.evaluate_first=false", "trainer.evaluate_every=null", "trainer.samples=0", "logging.every=1")
KINDS = {  # by remat: the kinds of computation of a cell, each with its field of `LayerTimes`
    "never": {"forward": "forward", "backward": "backward"},
    "always": {"forward": "inference", "recompute": "recompute", "backward": "backward"},
}
WARM_UP = 4  # steps that do not count
COLUMNS = {"model": "", "remat": "", "cell": "", "what": ""}
COLUMNS |= {"planned": ".2f", "measured": ".2f", "planned / measured": ".3f"}


def planned(words: Sequence[str]) -> dict[str, Any]:
    """Returns the plan by the layers' times on this machine."""
    plan: dict[str, Any] = json.loads(run_command("gpipe-plan", [*words, "plan.device=this", "plan.format=json"]))
    return plan


def measured(words: Sequence[str], steps: int) -> tuple[list[Row], Row]:
    """Returns the rows of metrics.jsonl of a run, without the first, and its summary."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        run_command("gpipe-train", [*words, *RUN, f"trainer.steps={WARM_UP + steps}", f"hydra.run.dir={directory}"])
        lines = (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        summary = json.loads((Path(directory) / "summary.json").read_text(encoding="utf-8"))
    return [json.loads(line) for line in lines[WARM_UP:]], summary


def compare(plans: Sequence[Row], steps: Sequence[Row]) -> Iterator[Row]:
    """Makes the rows of each cell, for one micro-batch, and of the bubble in per cent: planned and measured."""
    M, remat = plans[0]["M"], plans[0]["remat"]
    for cell in range(len(plans[0]["cells"])):
        times = {kind: f"{field}_seconds" for kind, field in KINDS[remat].items()}
        planned = {kind: mean(plan["cells"][cell][key] for plan in plans) for kind, key in times.items()}
        yield from cell_rows(cell, planned, [step["cells"][cell] for step in steps], M)
    for what, key in (("bubble, %", "bubble"), ("bubble by the measured times, %", "bubble_predicted")):
        found, bubble = median(step[key] for step in steps), mean(plan["bubble"] for plan in plans)
        row = {"cell": "all", "what": what, "planned": 100 * bubble, "measured": 100 * found}
        yield {**row, "planned / measured": bubble / found if found else None}


def cell_rows(cell: int, planned: Mapping[str, float], steps: Sequence[Mapping[str, float]], M: int) -> Iterator[Row]:
    """Makes the rows of one cell: milliseconds of each kind of computation of one micro-batch, and of their sum.

    Args:
        planned: seconds of one micro-batch, by kind of computation.
        steps: seconds of a whole step of M micro-batches, by kind; the median over the steps counts.
    """
    taken = [{kind: _seconds(step, kind) / M for kind in planned} for step in steps]
    pairs = {kind: (seconds, median(step[kind] for step in taken)) for kind, seconds in planned.items()}
    pairs["all of it"] = sum(planned.values()), median(sum(step.values()) for step in taken)
    for what, (seconds, found) in pairs.items():
        row = {"cell": cell, "what": f"{what}, ms", "planned": 1e3 * seconds, "measured": 1e3 * found}
        yield {**row, "planned / measured": seconds / found}


def _seconds(cell: Mapping[str, float], kind: str) -> float:
    """Returns the seconds of a step; a backward may come in two halves."""
    kinds = ("backward", "input_gradient", "weight_gradient") if kind == "backward" else (kind,)
    return sum(cell.get(each, 0.0) for each in kinds)


def medians(rounds: Sequence[Sequence[Row]]) -> Iterator[Row]:
    """Combines the rows of several rounds, with the quartiles of the rounds' ratios."""
    for rows in zip(*rounds, strict=True):
        planned, found = (median(row[side] for row in rows) for side in ("planned", "measured"))
        shares = [row["planned / measured"] for row in rows] if found else []
        row = {**rows[0], "planned": planned, "measured": found, "quartiles": None}
        if len(shares) > 1:
            low, _, high = quantiles(shares, n=4)
            row["quartiles"] = f"{low:.2f} … {high:.2f}"
        yield {**row, "planned / measured": median(shares) if shares else None}


def comparison(description: str | None, steps: int, rounds: int) -> Namespace:
    """Parses the command line of this benchmark and of benchmarks.cell_times, with `models` and `remats` as lists.

    Args:
        steps, rounds: the defaults.
    """
    options = parser(description)
    options.add_argument("--steps", type=int, default=steps, help=f"timed steps of each round (default: {steps})")
    options.add_argument("--rounds", type=int, default=rounds, help=f"plans and runs (default: {rounds})")
    options.add_argument("--models", default=",".join(MODELS), help="(default: %(default)s)")
    options.add_argument("--remats", default=",".join(REMATS), help="(default: %(default)s)")
    options.add_argument("overrides", nargs="*", help=f"of the configuration; default: {' '.join(CUT)}")
    arguments = options.parse_args()
    arguments.models, arguments.remats = arguments.models.split(","), arguments.remats.split(",")
    if arguments.quick:
        arguments.models, arguments.remats = arguments.models[:1], arguments.remats[:1]
        arguments.steps, arguments.rounds = min(steps, 10), 1
    return arguments


def configurations(arguments: Namespace) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yields each configuration: its name in the table, and its words on a command line."""
    for model, remat in product(arguments.models, arguments.remats):
        words = [*MODELS[model], *CUT, f"pipeline.remat={remat}", *arguments.overrides]
        yield {"model": model, "remat": remat}, words


def main() -> None:
    arguments = comparison(__doc__, steps=40, rounds=5)

    def rows() -> Iterator[Row]:
        for name, words in configurations(arguments):
            rounds, plans = [], [planned(words)]
            for _ in range(arguments.rounds):
                taken, _ = measured(words, arguments.steps)
                plans.append(planned(words))
                rounds.append(list(compare(plans[-2:], taken)))
            yield from ({**name, **row} for row in medians(rounds))

    report(COLUMNS, rows(), arguments.output)


if __name__ == "__main__":
    main()
