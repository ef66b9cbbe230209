"""Makes table 4: where a training step goes, in a real run of gpipe-train."""

import json
import tempfile
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.svg import draw_shares

from .options import BenchOptions
from .paper import TABLE_4
from .table import Say, Table
from .workers import run_command

K_OF_PAPER, M_OF_PAPER = 2, 16  # K: of its load imbalance; M: its bubble of 4.1 % lies a little under (K-1)/(M+K-1)
STEPS, QUICK_STEPS = 40, 8  # of the real run
BATCH = 128  # of the real run: 8 examples in each of 16 micro-batches


def breakdown_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Measures shares of a step: a column for the paper and one for the run.

    Raises:
        ConfigurationError: several K or M.
        CommandFailed: the real run failed.
    """
    K, M = one(options.K, "K", K_OF_PAPER), one(options.M, "M", M_OF_PAPER)
    columns = {"paper": TABLE_4, "gpipe-train here": real_run(K, M, options, say)["breakdown"]}
    rows = [
        {"share of a step": name.replace("_", " "), **{title: column[name] for title, column in columns.items()}}
        for name in TABLE_4
    ]
    title, formats = f"Table {number}: where a training step goes (K={K}, M={M})", dict.fromkeys(columns, ".1%")
    said = [
        f"Schedule {options.schedules[0]}, remat {options.remat}; gpipe-train with {' '.join(options.train)}. "
        "docs/run.md says what the shares are; the paper does not."
    ]
    return Table("table4", title, {"share of a step": "", **formats}, rows, said, draw_shares(columns, title))


def one(values: list[int] | None, key: str, default: int) -> int:
    """Returns the single value that table 4 needs."""
    if values is not None and len(values) != 1:
        raise ConfigurationError(f"{key}={','.join(map(str, values))}: table 4 is about one step; give one {key}")
    return values[0] if values else default


def real_run(K: int, M: int, options: BenchOptions, say: Say) -> dict[str, Any]:
    """Returns the summary of a short run of gpipe-train on this machine's devices."""
    words = [
        *(f"pipeline.K={K}", f"pipeline.workers={K}", f"pipeline.M={M}", f"data.batch_size={BATCH}"),
        *(f"pipeline.remat={options.remat}", f"pipeline.schedule={options.schedules[0]}"),
        *(f"trainer.steps={QUICK_STEPS if options.quick else STEPS}", "trainer.evaluate_every=null"),
        *("trainer.evaluate_first=false", "trainer.samples=0", *options.train),
    ]
    say(f"gpipe-train {' '.join(words)}")
    with tempfile.TemporaryDirectory(prefix="gpipe-bench-") as folder:
        run_command("gpipe-train", [*words, f"hydra.run.dir={folder}"])
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
    return summary
