"""Compares gpipe-plan's times of cells and its bubble with a run on the same machine.

For each model and remat policy: runs gpipe-plan with plan.device=this, then in each round gpipe-train and gpipe-plan
again. The machine's speed varies from minute to minute, and with it plans and runs: each run is compared with the mean
of the plans before and after it, and the median over the rounds is shown. A measured time is the median over the steps
of a cell's seconds for one micro-batch: forward, recompute (where there is any) and backward. Both models have
micro-batches of one shape, as a plan has. Use at most as many workers as there are free cores, because several on one
core take turns. `--overrides pipeline.M=8` changes both.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import Row, parser, report, run_command
from gpipe_cli.json_files import read_rows

MODELS = {
    "transformer_lm_small": ("model=transformer_lm_small",),
    "amoebanet": ("model=amoebanet", "lr_schedule.warmup_steps=1"),  # on the digits
    "traced": ("model=module", "model.module._target_=torchvision.models.resnet18", "model.module.num_classes=10"),
}
CUT = ("pipeline.K=2", "pipeline.M=4")
RUN = ("trainer.evaluate_first=false", "trainer.evaluate_every=null", "trainer.samples=0", "logging.every=1")
KINDS = {  # by remat: the kinds of computation of a cell, each with its field of a plan
    "never": {"forward": "forward", "backward": "backward"},
    "always": {"forward": "inference", "recompute": "recompute", "backward": "backward"},
}
WARM_UP = 4  # steps that do not count
COLUMNS = {"model": "", "remat": "", "cell": "", "what": ""}
SIDES = {"planned": ".2f", "measured": ".2f", "planned / measured": ".3f"}
COLUMNS |= SIDES


def planned(words: Sequence[str]) -> dict[str, Any]:
    """Returns the plan by the layers' times on this machine."""
    plan: dict[str, Any] = json.loads(run_command("gpipe-plan", [*words, "plan.device=this", "plan.format=json"]))
    return plan


def measured(words: Sequence[str], steps: int) -> tuple[list[Row], Row]:
    """Returns the rows of metrics.jsonl of a run, without the first, and its summary."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        run_command("gpipe-train", [*words, *RUN, f"trainer.steps={WARM_UP + steps}", f"hydra.run.dir={directory}"])
        rows, _ = read_rows(Path(directory) / "metrics.jsonl")
        return rows[WARM_UP:], json.loads((Path(directory) / "summary.json").read_text(encoding="utf-8"))


def compare(plans: Sequence[Row], steps: Sequence[Row]) -> Iterator[Row]:
    """Makes the rows of each cell, for one micro-batch, and of the bubble in per cent: planned and measured.

    Args:
        plans: their mean counts.
        steps: rows of metrics.jsonl; their median counts.
    """
    M, kinds = plans[0]["M"], KINDS[plans[0]["remat"]]
    for cell in range(len(plans[0]["cells"])):
        taken = [{kind: step["cells"][cell].get(kind, 0.0) / M for kind in kinds} for step in steps]
        pairs = {
            kind: (mean(plan["cells"][cell]["seconds"][field] for plan in plans), median(one[kind] for one in taken))
            for kind, field in kinds.items()
        }
        pairs["all of it"] = sum(one for one, _ in pairs.values()), median(sum(one.values()) for one in taken)
        yield from (pair(cell, f"{what}, ms", 1e3 * seconds, 1e3 * found) for what, (seconds, found) in pairs.items())
    bubble = mean(plan["bubble"] for plan in plans)
    for what, key in (("bubble, %", "bubble"), ("bubble by the measured times, %", "bubble_predicted")):
        yield pair("all", what, 100 * bubble, 100 * median(step[key] for step in steps))


def pair(cell: int | str, what: str, planned: float, measured: float) -> Row:
    """Makes a row."""
    ratio = planned / measured if measured else None
    return {"cell": cell, "what": what, "planned": planned, "measured": measured, "planned / measured": ratio}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=40, help="timed steps of each round (default: 40)")
    options.add_argument("--rounds", type=int, default=5, help="plans and runs (default: 5)")
    options.add_argument("--overrides", nargs="+", default=[], help=f"of the configuration; default: {' '.join(CUT)}")
    given = options.parse_args()
    cases = list(product(MODELS, KINDS))
    if given.quick:
        cases, given.steps, given.rounds = cases[:1], 10, 1

    def rows() -> Iterator[Row]:
        for model, remat in cases:
            words = [*MODELS[model], *CUT, f"pipeline.remat={remat}", *given.overrides]
            rounds, plans = [], [planned(words)]
            for _ in range(given.rounds):
                taken, _ = measured(words, given.steps)
                plans.append(planned(words))
                rounds.append(list(compare(plans[-2:], taken)))
            for rows in zip(*rounds, strict=True):
                middle = {name: median(row[name] or 0.0 for row in rows) for name in SIDES}
                yield {"model": model, "remat": remat, **rows[0], **middle}

    report(COLUMNS, rows(), given.output)


if __name__ == "__main__":
    main()
