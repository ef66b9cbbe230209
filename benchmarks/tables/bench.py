"""Measures one of the paper's tables as gpipe-bench is asked to, prints it and writes its files."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs.run_directory import require_writable
from gpipe_cli.terminal.command import FAILED, read_words, show, to_stderr
from gpipe_cli.terminal.text import duration

from .options import BenchOptions
from .table import Table
from .workers import CommandFailed, machine, machine_line

# Of each table the module that makes it, and its function.
MAKERS = {1: "capacity_table", **dict.fromkeys((2, 3), "throughput_table"), 4: "breakdown_table"}


def parse(words: Sequence[str]) -> BenchOptions:
    """Reads ``key=value`` words over the defaults of `BenchOptions`.

    Raises:
        ConfigurationError: a key is unknown, a value does not fit, or the table is missing.
    """
    own = read_words(words, get_type_hints(BenchOptions, include_extras=True), runs=False, overrides=False).own
    options = BenchOptions(**own)
    if options.table is None:
        raise ConfigurationError("which table? gpipe-bench table=1, 2, 3 or 4 (see --help)")
    return options


def measure_table(options: BenchOptions) -> int:
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
