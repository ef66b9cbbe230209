"""gpipe-report: one table and one plot of several runs of gpipe-train.

    gpipe-train -m pipeline.K=1,2,4 pipeline.M=4,8,16
    gpipe-report sweeps/NAME

    gpipe-report RUN                 of one run also lets the planner search for a faster pipeline, for its report.html

RUN ...      run directories, sweep directories (all their jobs), folders of either, or files inside a run
trust=[NAMES]   code of your own that the run may call, such as trust=[my_module.layers]
output=DIR   report.html, .json go there, .svg where runs can be compared; default: bench

Throughput is in units of the run with the smallest K, then M, among runs that differ in nothing else, with the ideal
K·M/(M+K-1) beside it, as in the paper's table 2. Runs that failed, are not finished or are damaged are named.
"""  # --help prints this

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gpipe_cli.disk import DiskError, write_whole, writing
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs.run_directory import require_writable
from gpipe_cli.terminal.command import REFUSED, read_words, run_command, show, to_stderr
from gpipe_cli.terminal.runs import compare, find_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, or 2 for a wrong call or where there is no run."""
    return run_command("gpipe-report", arguments, __doc__, _run, needs_words=True)


def _run(words: Sequence[str]) -> int:
    line = read_words(words, {"output": str, "trust": list[str]}, overrides=False)
    if not line.runs:
        raise ConfigurationError("which runs? gpipe-report sweeps/NAME (see --help)")
    runs, problems = find_runs([Path(run) for run in line.runs])
    for problem in problems:
        to_stderr(f"gpipe-report: {problem}")
    if not runs:
        return REFUSED
    folder = Path(line.own.get("output", "bench"))
    require_writable("output", folder)
    found = compare(runs)
    document, drawing = found.document(folder), found.drawing()
    show(document.text())
    paths = [folder / f"report.{end}" for end in ("html", "json", "svg")]
    with writing(folder):
        document.save(paths[0])
        write_whole(paths[1], json.dumps({"rows": found.facts}, indent=1) + "\n")
        if drawing is not None:
            drawing.save(paths[2])
    if len(runs) == 1 and runs[0].status in ("done", "stopped"):
        _advise(runs[0].folder, line.own.get("trust", []))
    show(f"\nwritten: {paths[0]}, .json{'' if drawing is None else ', .svg'}")
    return 0


def _advise(folder: Path, trusted: list[str]) -> None:
    """Lets the planner search for a faster pipeline, and writes the run's page anew."""
    from gpipe_cli.commands.plan import advise
    from gpipe_cli.jobs.page import PAGE, write_page

    try:
        with writing(folder):
            advise(str(folder), trusted)
    except (ConfigurationError, DiskError) as error:
        to_stderr(f"gpipe-report: no search for a faster pipeline: {error}")
        return
    write_page(folder, to_stderr)
    show(f"\nwhat would make it faster: {folder / PAGE}")


if __name__ == "__main__":
    sys.exit(main())
