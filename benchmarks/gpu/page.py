"""Writes docs/gpu.md: what has run on a GPU, what is only proven by rule, and all figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from gpipe_cli.terminal.text import markdown_table

from .part import Row
from .parts import PARTS
from .records import DONE, LATE, SKIPPED, Record, Records

HEAD = """\
# On GPUs

    python -m benchmarks.gpu        # or: make gpu

proves and measures what follows on a machine with one or more GPUs, without a network, in at most eight minutes, and
writes this page and `docs/gpu.json`. What there is no time for is named, and the same command goes on with it.
`python -m benchmarks.gpu exact bits` runs only these parts; `--again` repeats what has passed; `--device cpu --tiny`
tries every part without a GPU.

It needs this repository, torch (2.11 or newer; `make test TORCH=2.11.0` passed on a CPU on 23 November 2026) and the
packages of `pyproject.toml`. For a machine without a network:

    make wheelhouse PYTHON=3.12                                              # here; 3.12 is the Python there
    python3 -m pip install --no-index --find-links wheelhouse gpipe-cli pytest    # there, beside its own torch
    python3 -m benchmarks.gpu                                                # there, in this folder
"""
DEVICES = "tests/trainer/test_devices.py"
# A promise, the part that shows it on a GPU, and the test that shows it by rule, without one.
PROMISES = (
    ("gradients are those of a plain model", "exact", "tests/verify/test_verify.py"),
    ("K changes no bit", "bits", "tests/test_golden.py"),
    ("K changes no bit in 16-bit types", "precision", "tests/trainer/test_exactness.py"),
    (
        "no tensors of two devices are mixed",
        "tests",
        f"{DEVICES}::test_a_layer_that_makes_a_tensor_on_the_cpu_is_named",
    ),
    (
        "within a step the host never waits for the device",
        "tests",
        f"{DEVICES}::test_the_host_waits_at_the_end_of_a_step_only",
    ),
    (
        "a run goes on on another kind of device",
        "resume",
        f"{DEVICES}::test_a_run_goes_on_from_one_kind_of_device_on_another",
    ),
    ("messages over NCCL cannot stall", "exact", "tests/pipeline/test_nccl_rules.py"),
    ("planned memory and times are those of a run", "planned", "tests/planner/test_plan.py"),
)
WITHOUT = """\
## What is proven without one

`{devices}` runs engine, trainer, ties, averages, checkpoints, evaluation, beam search, copies ahead and measured layers
on `tests/helpers/late_device.py`, a device without hardware. Its operations run late, in an order drawn from a seed
that keeps only the order within a stream, events, and the host's waiting; a result that is used too early, or memory
that is given away too early, gives NaN. It cannot show kernels, NCCL, rounding or random numbers of a GPU, or times.

`tests/helpers/nccl_rules.py` models what NCCL and CUDA allow, with one communicator for two ranks (torch before 2.15)
and with one for a group (since). `python tests/helpers/nccl_runs.py 0 100000` draws whole runs: every schedule,
K up to 16, M up to 64, evaluation, decoding, checkpoints, tied weights, replicas with divided optimizer state.
A stall is drawn, and replayed by its seed. {runs}.
"""
RUNS = "None of these 100,000 runs stalled\n(23 November 2026)"


def write_page(records: Records, path: Path) -> None:
    """Writes the page from the records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(records), encoding="utf-8")


def page(records: Records) -> str:
    """Returns the page as Markdown."""
    rows = [[promise, shown(records.of.get(part), f"`{test}`"), part] for promise, part, test in PROMISES]
    paragraphs = [HEAD, "## What has run on a GPU\n", markdown_table(["promise", "state", "part"], rows), ""]
    paragraphs.append(WITHOUT.format(devices=DEVICES, runs=RUNS))
    for part in PARTS:
        if (record := records.of.get(part.name)) is not None:
            paragraphs += [f"## {part.name}\n", f"{part.title[0].upper()}{part.title[1:]}. {told(record)}\n"]
            paragraphs += [table(record.rows), ""] if record.rows else []
    missing = [f"* {part.name}: {part.title}" for part in PARTS if part.name not in records.of]
    paragraphs += ["## What has not run on a GPU\n", *missing] if missing else []
    return "\n".join(paragraphs).rstrip() + "\n"


def shown(record: Record | None, test: str) -> str:
    """Returns the state of a promise: shown on a GPU, or by which test."""
    if record is None or record.where == "CPU" or record.status in (SKIPPED, LATE):
        return f"by rule only: {test}"
    if record.status == DONE:
        return f"has run on {record.where}, {record.date}; by rule: {test}"
    return f"**failed** on {record.where}, {record.date}; by rule: {test}"


def told(record: Record) -> str:
    """Returns when and where a part has run."""
    place = f"{record.where}, torch {record.torch}, {record.date}, {record.seconds:.0f} s"
    why = f": {record.why.splitlines()[-1]}" if record.why else ""
    return f"{record.status.capitalize()}{why} ({place})."


def table(rows: Sequence[Row]) -> str:
    """Returns rows as a Markdown table, with a column for every key."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return markdown_table(columns, [list(_cells(row, columns)) for row in rows])


def _cells(row: Row, columns: Sequence[str]) -> Iterator[str]:
    for column in columns:
        value = row.get(column)
        if isinstance(value, bool):
            yield "yes" if value else "**no**"
        else:
            yield f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
