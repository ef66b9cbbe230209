"""What gpipe-plan says of a cell's time and of the bubble, beside a run on the same machine.

Runs the installed gpipe-train for some steps and reads the cells' forward and backward seconds from its summary.json;
asks gpipe-plan with plan.device=this for the same. Several cells on one worker share a core, so give at most as many
workers as there are free cores. Further arguments go to both: `python -m benchmarks.plan model.H=1024`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Report, parser

RUN = ("trainer.evaluate_first=false", "trainer.evaluate_every=null", "task.generation=null", "trainer.samples=0")


def run(command: str, words: list[str]) -> str:
    """What the command prints.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    path = Path(sys.executable).with_name(command)
    done = subprocess.run([path, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command} {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def measured(words: list[str], steps: int) -> dict[str, Any]:
    """summary.json of a run."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        run("gpipe-train", [*words, *RUN, f"trainer.steps={steps}", f"hydra.run.dir={directory}"])
        found: dict[str, Any] = json.loads((Path(directory) / "summary.json").read_text())
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=60, help="of the run (default: 60)")
    options.add_argument("overrides", nargs="*", help="for both commands; default: pipeline.K=2 pipeline.M=4")
    arguments = options.parse_args()
    words = ["pipeline.K=2", "pipeline.M=4", *arguments.overrides]
    planned = json.loads(run("gpipe-plan", [*words, "plan.device=this", "plan.format=json"]))
    summary = measured(words, 10 if arguments.quick else arguments.steps)
    M = summary["M"]
    report = Report({"cell": "d", "what": "", "planned, ms": ".2f", "measured, ms": ".2f", "planned / measured": ".3f"})
    report.begin()
    for cell, plan in zip(summary["cells"], planned["cells"], strict=True):
        seconds = cell["seconds"]
        backward = sum(seconds[part] for part in ("backward", "input_gradient", "weight_gradient"))
        for what, said, found in (
            ("forward", plan["forward_seconds"], seconds["forward"] / M),
            ("backward", plan["backward_seconds"], backward / M),
        ):
            row = {"cell": cell["cell"], "what": what, "planned, ms": 1e3 * said, "measured, ms": 1e3 * found}
            report.add({**row, "planned / measured": said / found})
    report.end(
        arguments.output,
        [
            f"share of the slowest cell: planned {max(c['share'] for c in planned['cells']):.3f}, measured "
            f"{slowest_share(summary['cells']):.3f}",
            f"bubble: planned {planned['bubble']:.3f}, by the measured times {summary['bubble_predicted']:.3f}, "
            f"measured {summary['bubble']:.3f}",
        ],
    )


def slowest_share(cells: list[dict[str, Any]]) -> float:
    """Of all computing, without recomputation."""
    parts = ("forward", "backward", "input_gradient", "weight_gradient")
    busy = [sum(cell["seconds"][part] for part in parts) for cell in cells]
    return max(busy) / sum(busy)


if __name__ == "__main__":
    main()
