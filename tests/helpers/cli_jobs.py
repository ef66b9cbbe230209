"""Runs `gpipe-train` with a trainer that needs no torch, for test_cli.py. Run as a script it is the command.

What the fake trainer does is chosen by `seed`: see the constants.
"""

import json
import sys
import time
from typing import Any

from gpipe_cli.commands.train import main
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs.job import EntryPoint
from gpipe_cli.launch.context import Context

FAILS, REFUSES, SLOW = 13, 14, 7


def train(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    settings = config["settings"]
    K, steps, seed = settings["pipeline"]["K"], settings["trainer"]["steps"], settings["seed"]
    if seed == FAILS and context.rank == 0:
        raise ValueError("thirteen is unlucky")
    if seed == REFUSES and context.rank == 0:
        raise ConfigurationError("fourteen is refused")
    if context.rank == 0:
        context.emit({"kind": "begun"})
        for step in range(1, steps + 1):
            context.emit(progress(step, steps))
            time.sleep(0.1 if seed == SLOW else 0)
            if context.stop_requested():
                (context.run_dir / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
                break
        (context.run_dir / "received.json").write_text(json.dumps(config))
        (context.run_dir / "summary.json").write_text(json.dumps(summary(K, seed)))
    return {"loss": 1 / K}


def progress(step: int, steps: int | None) -> dict[str, Any]:
    done = step / steps if steps else None
    figures = {"loss": 5 / step, "lr": 1e-3, "examples_per_second": 800.0, "bubble": 0.2, "skipped_updates": 0}
    return {"kind": "progress", "step": step, "steps": steps, "done": done, **figures}


def summary(K: int, seed: int) -> dict[str, Any]:
    evaluation = {"nll": 2.25, "accuracy": (90 + seed) / 100}
    figures = {"loss": 1 / K, "examples_per_second": 100.0 * K, "bubble": 0.1, "bubble_predicted": 0.12}
    return {**figures, "wall_seconds": 2.5, "evaluation": evaluation, "stopped_by": "steps"}


if __name__ == "__main__":
    sys.exit(main(program=EntryPoint("cli_jobs:train", preload=("json",))))
