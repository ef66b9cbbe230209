"""Proves and measures the tool on a machine with GPUs, part by part, in at most eight minutes.

Each part runs in a process of its own with its own limit of time, the most important ones first. A part that there is
no time left for is named; the same command again goes on with it, and with those that failed. All findings are kept in
one JSON file, with a page of tables beside it. It needs no network. --device cpu --tiny tries all parts on a CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks.common import ROOT

from .part import Part, Row, Site, Skipped
from .parts import PARTS, part_of
from .records import DONE, FAILED, LATE, SKIPPED, Record, Records

SKIPPED_CODE = 3  # exit code of the process of a part that this machine cannot run
TIMES_ON_CPU = 3  # as long a part may take on a CPU, which other work may keep busy
LINES_KEPT = 30  # of a failed part's output


def main() -> int:
    """Runs the command; returns 0 if no part failed."""
    arguments = read(sys.argv[1:])
    if arguments.rows is not None:
        return run_here(part_of(arguments.parts[0]), arguments)
    started, where, slower = time.monotonic(), "CPU", TIMES_ON_CPU
    if arguments.device == "cuda":
        where, slower = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}", 1
    records = Records(arguments.output)
    for part in wanted(arguments.parts, records, where):
        left = arguments.seconds - (time.monotonic() - started)
        if left < part.seconds:
            print(f"{part.name}: no time left; run the same command again")
            continue
        print(f"{part.name}: {part.title} …", flush=True)
        record = run_apart(part, arguments, min(slower * part.limit, left), where)
        records.keep(part.name, record)
        print(f"{part.name}: {record.status} after {record.seconds:.0f} s {record.why}", flush=True)
    print(f"{records.path} and {records.page} are written")
    return int(any(record.status in (FAILED, LATE) for record in records.of.values()))


def read(words: Sequence[str]) -> Namespace:
    options = ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    options.add_argument("parts", nargs="*", metavar="PART", help=f"only these: {', '.join(names)}")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--tiny", action="store_true", help="sizes for tests")
    options.add_argument("--seconds", type=float, default=480, help="for all parts (default: 480)")
    options.add_argument("--output", type=Path, metavar="FILE.json", help="default: docs/gpu-results.json")
    options.add_argument("--rows", type=Path, help="run one part in this process, for its rows")
    arguments = options.parse_args(words)
    if unknown := [name for name in arguments.parts if name not in names]:
        options.error(f"no part {', '.join(unknown)}: use {', '.join(names)}")
    folder = "docs" if arguments.device == "cuda" else "build"  # docs/ is for what ran on a GPU
    arguments.output = arguments.output or ROOT / folder / "gpu-results.json"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        options.error("torch finds no GPU here; --device cpu --tiny tries the parts on CPUs")
    return arguments


def wanted(names: Sequence[str], records: Records, where: str) -> list[Part]:
    """Returns the parts to run: named ones, else those never tried, then those that failed before."""
    if names:
        return [part_of(name) for name in names]
    kept = records.of
    open_parts = [p for p in PARTS if p.name not in kept or not kept[p.name].settles(where, torch.__version__)]
    return sorted(open_parts, key=lambda part: part.name in kept)  # stable: in their order


def run_apart(part: Part, arguments: Namespace, limit: float, where: str) -> Record:
    """Runs a part in a process of its own, kills it and its children at the limit, and returns what it found."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpipe-gpu-", ignore_cleanup_errors=True) as folder:
        rows, output = Path(folder) / "rows.jsonl", Path(folder) / "output"
        command = [sys.executable, "-m", "benchmarks.gpu", part.name, "--rows", str(rows), "--device", arguments.device]
        command += ["--tiny"] if arguments.tiny else []
        with output.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = rows.read_text().splitlines(keepends=True) if rows.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be cut off
        said = output.read_text(errors="replace").strip().splitlines()
    status, why = outcome(code, found, said, limit)
    date = datetime.now(timezone.utc).date().isoformat()
    return Record(status, where, torch.__version__, date, round(time.monotonic() - began, 1), found, why)


def outcome(code: int | None, rows: Sequence[Row], said: Sequence[str], limit: float) -> tuple[str, str]:
    """Returns the status of a part, and why."""
    if code is None:
        return LATE, f"killed after {limit:.0f} s"
    if code == SKIPPED_CODE:
        return SKIPPED, said[-1] if said else ""
    if code != 0:
        return FAILED, "\n".join(said[-LINES_KEPT:])
    wrong = sum(row.get("ok") is False for row in rows)
    return (FAILED, f"{wrong} of {len(rows)} checks are wrong") if wrong else (DONE, "")


def run_here(part: Part, arguments: Namespace) -> int:
    """Runs a part in this process and writes each row as it is found; returns the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="part-", dir=arguments.rows.parent))
    try:
        with arguments.rows.open("a", encoding="utf-8") as file:
            for row in part.find(Site(part.name, arguments.device, arguments.tiny, folder)):
                print(row, flush=True)
                file.write(json.dumps(row) + "\n")
                file.flush()
    except Skipped as reason:
        print(reason, flush=True)
        return SKIPPED_CODE
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
