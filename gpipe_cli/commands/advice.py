"""Writes plan.json of a run that has ended: what was planned for it, and the fastest pipeline that the planner finds.

`gpipe-train` starts it (`jobs/page.py`); its page shows both.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from gpipe_cli.commands.plan import make_request
from gpipe_cli.disk import write_whole
from gpipe_cli.jobs.page import PLAN
from gpipe_cli.terminal.runs import read_run


def main(folder: Path) -> None:
    """Plans the run as it was, and searches for the fastest on as many devices; both on the present machine."""
    run = read_run(folder)
    words = [word for word in run.words if not word.startswith("checkpoint.")]
    request = make_request([*words, f"pipeline.workers={run.workers}", "plan.device=this"])
    best = replace(request, options=replace(request.options, best=True, devices=run.workers))
    plans = {"own": request.plan().to_json(), "best": best.plan().to_json()}
    write_whole(folder / PLAN, json.dumps(plans) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
