"""Replaces ``pipeline.M=auto`` by the planner's answer before any worker starts.

The planner needs torch, which command processes never import, so it runs for some seconds in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gpipe_cli.config import Settings
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import torchrun
from gpipe_cli.jobs.devices import settle_workers
from gpipe_cli.parent import child_command
from gpipe_cli.terminal.frame import REFUSED

AUTO = "auto"


def settle_micro_batches(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the configuration with `pipeline.M` as a number, and a line about it for the console.

    Raises:
        ConfigurationError: another value is wrong, or no M fits into the device's memory.
    """
    provisional = Settings.from_config({**config, "pipeline": {**config["pipeline"], "M": 1}})
    workers, _ = settle_workers(provisional.pipeline, provisional.launch.inline, torchrun.world_size())
    asked = {**config, "pipeline": {**config["pipeline"], "M": 1, "workers": workers}}
    # Under torchrun all ranks use the first one's configuration; more planners would disturb its measurement.
    number = _ask_planner(json.dumps(asked, sort_keys=True)) if torchrun.is_first() else 1
    settled = {**config, "pipeline": {**config["pipeline"], "M": number}}
    return settled, f"pipeline.M={number} (auto: the fastest that fits, by `gpipe-plan plan.device=this`)"


@lru_cache(maxsize=8)  # a run is checked twice: before its directory is made, and when it starts
def _ask_planner(config: str) -> int:
    command = child_command("from gpipe_cli.planner.search.search import main; sys.exit(main())")
    done = subprocess.run(command, input=config, capture_output=True, text=True)
    if done.returncode == REFUSED:
        raise ConfigurationError(f"pipeline.M=auto: {done.stderr.strip()}")
    if done.returncode:
        raise ConfigurationError(f"pipeline.M=auto: the planner failed; give a number\n{done.stderr.strip()}")
    return int(done.stdout.strip().splitlines()[-1])
