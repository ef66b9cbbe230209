"""Reads a configuration as JSON from standard input and prints the M that the planner finds for it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from ...config import Settings
from ...errors import ConfigurationError
from ..options import Options
from ..planner import Planner
from .search import fastest


def main() -> int:
    """Returns 0, or 2 when there is no such M; standard error then says why."""
    try:
        settings = Settings.from_config(json.load(sys.stdin))
        options = replace(Options.default(), device=None, find_M=True)
        kind, remat = settings.pipeline.schedule, settings.pipeline.remat
        print(fastest(Planner(settings, options), [kind], (remat,), only_M=True).plan.M)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
