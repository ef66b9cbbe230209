"""gpipe-bench: measures one of the paper's tables here and sets the paper's figures beside it.

    gpipe-bench table=2 quick=true        throughput for K = 2, 4, 8 and M = 1, 4, 32, on emulated accelerators
    gpipe-bench table=3                   the same with slow links between the workers
    gpipe-bench table=4                   where a training step goes
    gpipe-bench table=1                   the largest models that fit

Prints a table and writes it, its figures and its plot: OUTPUT/tableN.html, .json, .svg. The keys:
"""  # --help prints this

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from gpipe_cli.benchmarks.tables.options import BenchOptions
from gpipe_cli.benchmarks.tables.table import Table
from gpipe_cli.benchmarks.tables.workers import CommandFailed, machine, machine_line
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs.run_directory import require_writable
from gpipe_cli.terminal.command import FAILED, read_words, run_command, show, to_stderr
from gpipe_cli.terminal.text import duration
from gpipe_cli.typed_section import read_section

DEFAULTS = files("gpipe_cli.conf").joinpath("bench.yaml")
# Of each table the module that makes it, and its function.
MAKERS = {1: "capacity_table", **dict.fromkeys((2, 3), "throughput_table"), 4: "breakdown_table"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 when a measurement failed, 2 for a wrong call."""
    return run_command(
        "gpipe-bench", arguments, f"{__doc__}\n{keys_text()}", lambda words: run(parse(words)), needs_words=True
    )


def keys_text() -> str:
    """Returns every key with its default and meaning, as in conf/bench.yaml."""
    lines = DEFAULTS.read_text(encoding="utf-8").splitlines()
    return "\n".join(f"    {line}".rstrip() for line in lines if not line.startswith("#")).strip("\n") + "\n"


def parse(words: Sequence[str]) -> BenchOptions:
    """Reads ``key=value`` words over the defaults of ``conf/bench.yaml``.

    Raises:
        ConfigurationError: a key is unknown, a value does not fit, or the table is missing.
    """
    values: dict[str, Any] = yaml.safe_load(DEFAULTS.read_text(encoding="utf-8"))
    hints = get_type_hints(BenchOptions, include_extras=True)
    options = read_section(BenchOptions, {**values, **read_words(words, hints, runs=False, overrides=False).own}, "")
    if options.table is None:
        raise ConfigurationError("which table? gpipe-bench table=1, 2, 3 or 4 (see --help)")
    return options


def run(options: BenchOptions) -> int:
    """Measures one table, prints it and writes its files; returns the exit code."""
    assert options.table is not None
    name = MAKERS[options.table]
    make: Callable[..., Table] = getattr(import_module(f"gpipe_cli.benchmarks.tables.{name}"), name)
    folder = Path(options.output)
    is_new = not folder.exists()
    require_writable("output", folder)
    where, began = machine_line(), time.monotonic()
    show(where)
    try:
        table = make(options.table, options, lambda text: show(f"  {text}"))
    except CommandFailed as error:
        to_stderr(f"gpipe-bench: {error}")
        return FAILED
    except ConfigurationError:
        if is_new:
            folder.rmdir()  # what is refused leaves nothing
        raise
    seconds = time.monotonic() - began
    show(f"\n{table.title}\n\n{table.document().text()}")
    about = {"options": dataclasses.asdict(options), "machine": machine(), "seconds": round(seconds, 1)}
    paths = table.write(folder, where, about)
    show(f"\n{duration(seconds)}; written: {', '.join(str(path) for path in paths)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
