"""Makes table 4: where a training step goes, on emulated accelerators and in a real run of gpipe-train."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.metrics.breakdown import mean_breakdown
from gpipe_cli.schedule.schedule import kept_graphs, schedule

from ..options import BenchOptions
from ..paper import TABLE_4
from ..throughput import TABLES
from ..workers import run_command
from .table import Say, Table
from .throughput_table import check, make_settings, measure

K_OF_PAPER, M_OF_PAPER = 2, 16  # K: of its load imbalance; M: its bubble of 4.1 % lies a little under (K-1)/(M+K-1)
STEPS, QUICK_STEPS = 40, 8  # of the real run
BATCH = 128  # of the real run: 8 examples in each of 16 micro-batches


def breakdown_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Measures shares of a step: a column for the paper, for each emulated model, and for the real run.

    Raises:
        ConfigurationError: several K or M, or an unknown schedule.
        CommandFailed: the real run failed.
    """
    K, M = one(options.K, "K", K_OF_PAPER), one(options.M, "M", M_OF_PAPER)
    options = replace(options, K=[K], M=[M], schedules=options.schedules[:1], peers=False)
    check(options, TABLES[2])
    columns: dict[str, Mapping[str, float]] = {"paper": TABLE_4}
    columns |= {f"{name}, emulated": shares for name, shares in emulated(K, M, options, say).items()}
    columns["gpipe-train here"] = real_run(K, M, options, say)["breakdown"]
    rows = [
        {"share of a step": name.replace("_", " "), **{title: column[name] for title, column in columns.items()}}
        for name in TABLE_4
    ]
    return Table(
        "table4",
        f"Table {number}: where a training step goes (K={K}, M={M})",
        {"share of a step": "", **dict.fromkeys(columns, ".1%")},
        rows,
        [
            f"Schedule {options.schedules[0]}, remat {options.remat}; gpipe-train with {' '.join(options.train)}. "
            "docs/run.md says what the shares are; the paper does not.",
            "Emulated accelerators have no data and no weight update: layers sleep, messages are real.",
        ],
        {"columns": columns},
        bars=columns,
    )


def one(values: list[int] | None, key: str, default: int) -> int:
    """Returns the single value that table 4 needs."""
    if values is not None and len(values) != 1:
        raise ConfigurationError(f"{key}={','.join(map(str, values))}: table 4 is about one step; give one {key}")
    return values[0] if values else default


def emulated(K: int, M: int, options: BenchOptions, say: Say) -> dict[str, Mapping[str, float]]:
    """Returns the shares by the name of the model."""
    kind, placement = options.schedules[0], tuple(range(K))
    settings = make_settings(TABLES[2], options, [(K, M)], say)
    lists = schedule(kind, placement, M, kept_graphs(options.remat, K, M))
    return {
        setting.costs.model.name: mean_breakdown(lists, placement, found["cells"], [0.0] * K, found["seconds"][kind])[0]
        for setting, found in zip(settings, measure(settings, options, say), strict=True)
    }


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
