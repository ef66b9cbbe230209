"""Writes plan.json of a run that has ended: what was planned for it, and the fastest pipeline that the planner finds.

`gpipe-train` starts it (`jobs/page.py`), for a limited time; its page shows what it has found by then.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gpipe_cli.commands.plan import make_request
from gpipe_cli.disk import write_whole
from gpipe_cli.jobs.page import PLAN
from gpipe_cli.planner.planner import Planner
from gpipe_cli.planner.search.candidates import FREE
from gpipe_cli.planner.search.search import Search
from gpipe_cli.terminal.runs import read_run


def main(folder: Path) -> None:
    """Plans the run as it was, on the present machine, and searches with its M, whose layers are then measured."""
    run = read_run(folder)
    workers = run.summary.get("workers")
    words = [word for word in run.words if not word.startswith("checkpoint.")]
    request = make_request([*words, f"pipeline.workers={workers}", "plan.device=this"])
    planner = Planner(request.settings, request.options)
    plans: dict[str, Any] = {"own": planner.plan().to_json()}
    write_whole(folder / PLAN, json.dumps(plans) + "\n")
    free = [key for key in FREE if key not in ("M", "replicas")]
    plans["best"] = Search(planner, free).fastest(workers or 1).to_json()
    write_whole(folder / PLAN, json.dumps(plans) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
