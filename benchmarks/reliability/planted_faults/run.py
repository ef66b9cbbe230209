"""Runs gpipe-verify on the subject with a fault planted: in this process, or in workers of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from gpipe_cli.jobs.configuration import composed, prepare
from gpipe_cli.jobs.job import EntryPoint, launch_program
from gpipe_cli.launch.context import Context
from gpipe_cli.verify import run as verify

from .faults import planted
from .subject import PARTITION, WORDS

SUBJECT = (*WORDS, PARTITION)  # of the command line


def main(context: Context, config: dict[str, Any]) -> dict[str, Any] | None:
    """Verifies with the fault of ``config`` planted; the entry point of a worker."""
    with planted(config["fault"]):
        return verify.main(context, config)


def verified(run_dir: Path, *words: str, fault: str = "", subject: bool = True) -> dict[str, Any]:
    """Returns the report of gpipe-verify.

    Args:
        run_dir: the directory of the run, made here.
        words: of the command line; without pipeline.workers and pipeline.replicas all runs in this process.
        subject: on the subject's model, data and task.
    """
    program = EntryPoint(f"{__name__}:main", ("torch", __name__))
    typed = [*(SUBJECT if subject else ()), *words]
    apart = any(word.startswith(("pipeline.workers=", "pipeline.replicas=")) for word in typed)
    config = prepare(composed("verify", [*typed, *(() if apart else ("launch.inline=true",))])).config
    run_dir.mkdir(parents=True, exist_ok=True)
    job = {"settings": config, "started_at": time.time(), "fault": fault}
    report = launch_program(program, job, run_dir, lambda event: None)
    assert isinstance(report, dict)
    return report
