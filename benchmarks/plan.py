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
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import Report, parser

MODELS = {
    "transformer_lm_small": ("model=transformer_lm_small",),
    "amoebanet": ("model=amoebanet", "schedule.warmup_steps=1"),  # on the digits
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


def compare(plans: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Milliseconds of each cell for one micro-batch, planned and measured, and the bubble in per cent."""
    plan = plans[0]
    recomputes = plan["remat"] == "always"
    keys = {"forward": "inference_seconds" if recomputes else "forward_seconds"}
    keys |= ({"recompute": "recompute_seconds"} if recomputes else {}) | {"backward": "backward_seconds"}
    for cell in plan["cells"]:
        said = {what: mean(each["cells"][cell["cell"]][key] for each in plans) for what, key in keys.items()}
        taken = [{what: _seconds(step["cells"][cell["cell"]], what) / plan["M"] for what in said} for step in steps]
        parts = {what: (seconds, median(step[what] for step in taken)) for what, seconds in said.items()}
        parts["all of it"] = sum(said.values()), median(sum(step.values()) for step in taken)
        for what, (seconds, found) in parts.items():
            row = {"cell": cell["cell"], "what": f"{what}, ms", "planned": 1e3 * seconds, "measured": 1e3 * found}
            yield {**row, "planned / measured": seconds / found}
    for what, key in (("bubble, %", "bubble"), ("bubble by the measured times, %", "bubble_predicted")):
        found, bubble = median(step[key] for step in steps), mean(each["bubble"] for each in plans)
        row = {"cell": "all", "what": what, "planned": 100 * bubble, "measured": 100 * found}
        yield {**row, "planned / measured": bubble / found if found else None}


def _seconds(cell: dict[str, float], what: str) -> float:
    """Of a step; a backward in two halves is one."""
    parts = ("backward", "input_gradient", "weight_gradient") if what == "backward" else (what,)
    return sum(cell[part] for part in parts)


def medians(rounds: Sequence[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The rows of the rounds as one."""
    for rows in zip(*rounds, strict=True):
        planned, found = (median(row[side] for row in rows) for side in ("planned", "measured"))
        share = median(row["planned / measured"] for row in rows) if found else None
        yield {**rows[0], "planned": planned, "measured": found, "planned / measured": share}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=40, help="of each run that count (default: 40)")
    options.add_argument("--rounds", type=int, default=5, help="runs between two plans each (default: 5)")
    options.add_argument("--models", default=",".join(MODELS), help="(default: %(default)s)")
    options.add_argument("--remats", default=",".join(REMATS), help="(default: %(default)s)")
    options.add_argument("overrides", nargs="*", help=f"for both commands; default: {' '.join(CUT)}")
    arguments = options.parse_args()
    models, remats = arguments.models.split(","), arguments.remats.split(",")
    steps, rounds = arguments.steps, arguments.rounds
    if arguments.quick:
        models, remats, steps, rounds = models[:1], remats[:1], 10, 1
    report = Report(COLUMNS)
    report.begin()
    for model, remat in product(models, remats):
        words = [*MODELS[model], *CUT, f"pipeline.remat={remat}", *arguments.overrides]
        found = []
        plans = [planned(words)]
        for _ in range(rounds):
            taken = measured(words, steps)
            plans.append(planned(words))
            found.append(list(compare(plans[-2:], taken)))
        for row in medians(found):
            report.add({"model": model, "remat": remat, **row})
    report.end(arguments.output)


if __name__ == "__main__":
    main()
