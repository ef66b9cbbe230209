"""Implements ``gpipe-report``: sets runs of gpipe-train beside each other, as in the paper's table 2. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpipe_cli.bench.tables.run_table import run_table
from gpipe_cli.errors import ConfigurationError, Problems
from gpipe_cli.terminal.frame import FAILED, is_path, run_command, to_stderr
from gpipe_cli.terminal.output import show
from gpipe_cli.terminal.runs import find_runs
from gpipe_cli.typed_section import unknown_key

HELP = """\
gpipe-report: one table and one plot of several runs of gpipe-train.

    gpipe-train -m pipeline.K=1,2,4 pipeline.M=4,8,16
    gpipe-report sweeps/NAME

RUN ...      run directories, sweep directories (all their jobs), folders of either, or files inside a run
output=DIR   report.md, .json, .png and .svg go there; default: bench

Throughput is in units of the run with the smallest K, then M, among runs that differ in nothing else, with the ideal
K·M/(M+K-1) beside it, as in the paper's table 2. Runs that failed, are not finished or are damaged are named.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 when there is no run to show, 2 for a wrong call."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command("gpipe-report", words, HELP, partial(_run, words), needs_words=True)


def _run(words: Sequence[str]) -> int:
    paths, folder = read_words(words)
    runs, problems = find_runs(paths)
    for problem in problems:
        to_stderr(f"gpipe-report: {problem}")
    if not runs:
        return FAILED
    table = run_table(runs)
    show(table.text() + "\n")
    for note in table.notes:
        show(f"* {note}")
    try:
        written = table.write(folder)
    except OSError as error:
        raise ConfigurationError(f"output={folder}: {error.strerror}; name a directory that can be written") from error
    show(f"\nwritten: {', '.join(str(path) for path in written)}")
    return 0


def read_words(words: Sequence[str]) -> tuple[list[Path], Path]:
    """Returns the paths of the runs and the output folder.

    Raises:
        ConfigurationError: a word is an option or an unknown key, or no run is named.
    """
    problems, paths, output = Problems(), list[Path](), "bench"
    for word in words:
        key, _, value = word.partition("=")
        if is_path(word):
            paths.append(Path(word))
        elif word.startswith("-"):
            problems.append(f"there is no option {word}; give runs and output=DIR (see --help)")
        elif key == "output":
            output = value
        else:
            problems.append(unknown_key(key, ["output"]))
    if not paths:
        problems.append("which runs? gpipe-report sweeps/NAME (see --help)")
    problems.refuse()
    return paths, Path(output)


if __name__ == "__main__":
    sys.exit(main())
