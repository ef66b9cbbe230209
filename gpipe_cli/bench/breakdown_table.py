"""Table 4: where a training step goes, on emulated accelerators and in a real run of gpipe-train, beside the paper."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.metrics.breakdown import mean_breakdown
from gpipe_cli.schedule.schedule import schedule
from gpipe_cli.schedule.simulate import ideal_bubble

from .options import BenchOptions
from .paper import TABLE_4
from .profiles import Model, profile_models
from .tables import Say, Table
from .throughput_settings import TABLES, Setting, serial_seconds
from .throughput_tables import check
from .workers import run_workers

K_OF_PAPER, M_OF_PAPER = 2, 16  # K: of its load imbalance; M: its bubble of 4.1 % lies a little under (K-1)/(M+K-1)
WORKER = "gpipe_cli.bench.emulated_breakdown:worker"
STEPS, QUICK_STEPS = 40, 8  # of the real run
BATCH = 128  # of the real run: 8 examples in each of 16 micro-batches


class RunFailed(RuntimeError):
    """The run of gpipe-train ended with an error; the message has its last lines."""


def breakdown_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Shares of a step: a column for the paper, for each emulated model, and for the real run.

    Raises:
        ConfigurationError: several K or M, or an unknown schedule.
        RunFailed: the real run failed.
    """
    K, M = one(options.K, "K", K_OF_PAPER), one(options.M, "M", M_OF_PAPER)
    options = replace(options, K=[K], M=[M])
    check(options, TABLES[2])
    columns: dict[str, Mapping[str, float]] = {"paper": TABLE_4}
    facts: dict[str, Any] = {"K": K, "M": M}
    for name, shares in emulated(K, M, options, say).items():
        columns[f"{name}, emulated"] = shares
    summary = real_run(K, M, options, say)
    columns["gpipe-train here"] = summary["breakdown"]
    facts["real_run"] = {key: summary[key] for key in ("bubble", "bubble_predicted", "examples_per_second", "device")}
    facts["columns"] = columns
    rows: list[list[object]] = [
        [name.replace("_", " "), *(f"{100 * column[name]:.1f} %" for column in columns.values())] for name in TABLE_4
    ]
    title = f"Table {number}: where a training step goes (K={K}, M={M})"
    return Table("table4", title, ["share of a step", *columns], rows, notes(K, M, options), facts, bars=columns)


def one(values: list[int] | None, key: str, default: int) -> int:
    """The single value that table 4 wants."""
    if values is not None and len(values) != 1:
        raise ConfigurationError(f"{key}={','.join(map(str, values))}: table 4 is about one step; give one {key}")
    return values[0] if values else default


def emulated(K: int, M: int, options: BenchOptions, say: Say) -> dict[str, Mapping[str, float]]:
    """By the name of the model."""
    say("counting the models' FLOPs on fake tensors")
    profiles = profile_models([Model(family, TABLES[2].sizes[family], options.small) for family in options.models])
    settings = [Setting(profile, K, M, serial_seconds(M, options), options, False) for profile in profiles]
    say(f"emulated accelerators, K={K}, M={M}")
    config = {
        "settings": [setting.config() for setting in settings],
        "repetitions": options.timed_steps,
        "realtime": options.realtime,
    }
    found = run_workers(WORKER, K, config)
    placement = tuple(range(K))
    lists = schedule(options.schedules[0], placement, M, options.remat)
    shares = [mean_breakdown(lists, placement, f["cells"], [0.0] * K, f["step_seconds"]).shares() for f in found]
    return {setting.profile.model.name: share for setting, share in zip(settings, shares, strict=True)}


def real_run(K: int, M: int, options: BenchOptions, say: Say) -> dict[str, Any]:
    """The summary of a short run of gpipe-train on this machine's devices.

    Raises:
        RunFailed: it ended with an error.
    """
    words = [
        *(f"pipeline.K={K}", f"pipeline.workers={K}", f"pipeline.M={M}", f"data.batch_size={BATCH}"),
        *(f"pipeline.remat={options.remat}", f"pipeline.schedule={options.schedules[0]}"),
        *(f"trainer.steps={QUICK_STEPS if options.quick else STEPS}", "trainer.evaluate_every=null"),
        *("trainer.evaluate_first=false", "trainer.samples=0", *options.train),
    ]
    say(f"gpipe-train {' '.join(words)}")
    with tempfile.TemporaryDirectory(prefix="gpipe-bench-") as folder:
        command = [sys.executable, "-m", "gpipe_cli.commands.train", *words, f"hydra.run.dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
            raise RunFailed(f"gpipe-train {' '.join(words)} ended with {done.returncode}:\n{last}")
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
    return summary


def notes(K: int, M: int, options: BenchOptions) -> list[str]:
    return [
        "The paper defines none of the shares and names neither model nor M; its load imbalance is for two partitions. "
        f"(K-1)/(M+K-1) is {100 * ideal_bubble(K, M):.1f} % here.",
        f"Schedule {options.schedules[0]}, remat {options.remat}. computation: forward and backward. bubble: what "
        "the schedule leaves idle with even cells. load imbalance: what the cells' own times leave idle beyond that. "
        "setup: all else: messages, data, the exchange that ends a step, unsteady times.",
        "Emulated accelerators have no data and no weight update: layers sleep, messages are real.",
        f"gpipe-train here: {K} workers on this machine's own devices, "
        + " ".join(options.train or ["the default model"])
        + "; where workers share cores with other processes, setup is mostly waiting for them.",
    ]
