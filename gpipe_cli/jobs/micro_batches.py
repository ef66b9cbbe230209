"""``pipeline.M=auto``: the planner's answer, before any worker starts.

The planner needs torch, which the command processes never import: it runs in a process of its own, for some seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gpipe_cli.config import Settings
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import torchrun
from gpipe_cli.jobs.devices import settle_workers
from gpipe_cli.terminal.frame import REFUSED

AUTO = "auto"


def settle_micro_batches(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A configuration with `pipeline.M` as a number, and the line that tells the person.

    Raises:
        ConfigurationError: the configuration is wrong in another way, or no M fits into the device's memory.
    """
    provisional = Settings.from_config({**config, "pipeline": {**config["pipeline"], "M": 1}})
    workers, _ = settle_workers(provisional.pipeline, provisional.launch.inline, torchrun.world_size())
    asked = {**config, "pipeline": {**config["pipeline"], "M": 1, "workers": workers}}
    # Under torchrun the first process's configuration is everybody's; others asking would only disturb its measuring.
    number = _ask_planner(json.dumps(asked, sort_keys=True)) if torchrun.is_first() else 1
    settled = {**config, "pipeline": {**config["pipeline"], "M": number}}
    return settled, f"pipeline.M={number} (auto: the fastest that fits, by `gpipe-plan plan.device=this`)"


@lru_cache(maxsize=8)  # a run is checked before its directory is made, and again when it starts
def _ask_planner(config: str) -> int:
    command = [sys.executable, "-m", "gpipe_cli.planner.search.search"]
    done = subprocess.run(command, input=config, capture_output=True, text=True)
    if done.returncode == REFUSED:
        raise ConfigurationError(f"pipeline.M=auto: {done.stderr.strip()}")
    if done.returncode:
        raise ConfigurationError(f"pipeline.M=auto: the planner failed; give a number\n{done.stderr.strip()}")
    return int(done.stdout.strip().splitlines()[-1])
