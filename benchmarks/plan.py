"""What gpipe-plan says of the cells' times and of the bubble, beside a run on the same machine.

For each model and remat policy: asks gpipe-plan with plan.device=this, then some rounds of a run of the installed
gpipe-train and another plan. The machine's speed wavers from minute to minute, and with it plans and runs: each run is
compared with the mean of the plans before and after it, and the median over the rounds counts. A measured time is the
median over the steps of what a cell took for one micro-batch: forward, recompute (where there is any) and backward.
Both models have micro-batches of one shape, as a plan has. Give at most as many workers as there are free cores,
because several on one core take turns. Further arguments go to both commands: `python -m benchmarks.plan pipeline.M=8`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.common import Report, parser

MODELS = {
    "transformer_lm_small": ("model=transformer_lm_small",),
    "amoebanet": ("model=amoebanet", "lr_schedule.warmup_steps=1"),  # on the digits
}
REMATS = ("never", "always")
CUT = ("pipeline.K=2", "pipeline.M=4")
RUN = ("trainer.evaluate_first=false", "trainer.evaluate_every=null", "trainer.samples=0", "logging.every=1")
WARM_UP = 4  # steps that do not count
COLUMNS = {"model": "", "remat": "", "cell": "", "what": ""}
COLUMNS |= {"planned": ".2f", "measured": ".2f", "planned / measured": ".3f"}


def run(command: str, words: Sequence[str]) -> str:
    """What the command prints.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    path = Path(sys.executable).with_name(command)
    done = subprocess.run([path, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command} {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def planned(words: Sequence[str]) -> dict[str, Any]:
    """By the layers' times on this machine."""
    plan: dict[str, Any] = json.loads(run("gpipe-plan", [*words, "plan.device=this", "plan.format=json"]))
    return plan


def measured(words: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of a run, without the first."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        run("gpipe-train", [*words, *RUN, f"trainer.steps={WARM_UP + steps}", f"hydra.run.dir={directory}"])
        lines = (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[WARM_UP:]]


def kinds_of_work(remat: str) -> dict[str, str]:
    """What a cell does in a step, and which of the fields of `LayerTimes` says how long that takes."""
    if remat == "always":
        return {"forward": "inference", "recompute": "recompute", "backward": "backward"}
    return {"forward": "forward", "backward": "backward"}


def compare(plans: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each cell and one micro-batch, planned and measured, and the bubble in per cent."""
    M, remat = plans[0]["M"], plans[0]["remat"]
    for cell in range(len(plans[0]["cells"])):
        times = {what: f"{key}_seconds" for what, key in kinds_of_work(remat).items()}
        said = {what: mean(plan["cells"][cell][key] for plan in plans) for what, key in times.items()}
        yield from cell_rows(cell, said, [step["cells"][cell] for step in steps], M)
    for what, key in (("bubble, %", "bubble"), ("bubble by the measured times, %", "bubble_predicted")):
        found, bubble = median(step[key] for step in steps), mean(plan["bubble"] for plan in plans)
        row = {"cell": "all", "what": what, "planned": 100 * bubble, "measured": 100 * found}
        yield {**row, "planned / measured": bubble / found if found else None}


def cell_rows(
    cell: int, said: Mapping[str, float], steps: Sequence[Mapping[str, float]], M: int
) -> Iterator[dict[str, Any]]:
    """Milliseconds of each kind of work for one micro-batch, and of all of it.

    Args:
        said: seconds of one micro-batch, by kind of work.
        steps: seconds of a whole step of M micro-batches, by part; the median over the steps counts.
    """
    taken = [{what: _seconds(step, what) / M for what in said} for step in steps]
    parts = {what: (seconds, median(step[what] for step in taken)) for what, seconds in said.items()}
    parts["all of it"] = sum(said.values()), median(sum(step.values()) for step in taken)
    for what, (seconds, found) in parts.items():
        row = {"cell": cell, "what": f"{what}, ms", "planned": 1e3 * seconds, "measured": 1e3 * found}
        yield {**row, "planned / measured": seconds / found}


def _seconds(cell: Mapping[str, float], what: str) -> float:
    """Of a step; a backward in two halves is one."""
    parts = ("backward", "input_gradient", "weight_gradient") if what == "backward" else (what,)
    return sum(cell.get(part, 0.0) for part in parts)


def medians(rounds: Sequence[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The rows of the rounds as one, with the quartiles of the rounds' ratios."""
    for rows in zip(*rounds, strict=True):
        planned, found = (median(row[side] for row in rows) for side in ("planned", "measured"))
        shares = [row["planned / measured"] for row in rows] if found else []
        row = {**rows[0], "planned": planned, "measured": found, "quartiles": None}
        if len(shares) > 1:
            low, _, high = quantiles(shares, n=4)
            row["quartiles"] = f"{low:.2f} … {high:.2f}"
        yield {**row, "planned / measured": median(shares) if shares else None}


def comparison(description: str | None, steps: int, rounds: int) -> Namespace:
    """The command line of this benchmark and its sibling: how often, and which `models` and `remats`, as lists.

    Args:
        steps, rounds: the defaults.
    """
    options = parser(description)
    options.add_argument("--steps", type=int, default=steps, help=f"of each round that count (default: {steps})")
    options.add_argument("--rounds", type=int, default=rounds, help=f"of planning and running (default: {rounds})")
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
    """What names each of them in the table, and its words on a command line."""
    for model, remat in product(arguments.models, arguments.remats):
        words = [*MODELS[model], *CUT, f"pipeline.remat={remat}", *arguments.overrides]
        yield {"model": model, "remat": remat}, words


def main() -> None:
    arguments = comparison(__doc__, steps=40, rounds=5)
    report = Report(COLUMNS)
    report.begin()
    for name, words in configurations(arguments):
        found = []
        plans = [planned(words)]
        for _ in range(arguments.rounds):
            taken = measured(words, arguments.steps)
            plans.append(planned(words))
            found.append(list(compare(plans[-2:], taken)))
        for row in medians(found):
            report.add({**name, **row})
    report.end(arguments.output)


if __name__ == "__main__":
    main()
