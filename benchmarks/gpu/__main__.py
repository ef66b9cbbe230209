"""Proves and measures the tool on a machine with GPUs, part by part, in at most eight minutes.

Each part runs in a process of its own with its own limit of time, the most important ones first. A part that there is
no time left for is named; the same command again goes on with it, and with those that failed. All findings are kept in
one JSON file, with a page of tables beside it. It needs no network. --device cpu --tiny tries all parts on a CPU.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import ROOT, Row, table_of
from gpipe_cli.disk import write_whole

from . import checks, speed
from .checks import Site

Records = dict[str, Row]  # by part: status, why, where, torch, date, seconds, rows
TIMES_ON_CPU = 3  # as long a part may take on a CPU, which other work may keep busy
LINES_KEPT = 30  # of a failed part's output


class Part(NamedTuple):
    """Describes a part.

    Attributes:
        find: yields rows as they are found; with a key "ok" a row is a check.
        limit: seconds after which it is killed; what it had found until then stays.
    """

    title: str
    find: Callable[[Site], Iterator[Row]]
    limit: float


PARTS = {  # the most important first
    "machine": Part("the machine", checks.machine_facts, 40),
    "exact": Part("steps compared with a plain model, every gradient by name", checks.exact, 120),
    "commands": Part("commands on all GPUs: default, torchrun, number types, replicas", checks.commands, 150),
    "tests": Part("every test marked gpu", checks.tests, 90),
    "host": Part("a step in which the host never waits; kernels; instructions against the clock", speed.host, 40),
    "bits": Part("the same bits at every K: real sizes, every type of numbers, compiled", checks.bits, 240),
    "ends": Part("a worker killed, a run asked to stop: seconds to the end", checks.ends, 60),
    "t_6_8192_16": Part("the paper's T(6,8192,16)", speed.measure, 60),
    "amoebanet_b": Part("the paper's AmoebaNet-B (18, 512) at 480 × 480 pixels", speed.measure, 100),
    "planned": Part("planned and measured cells, bubble and memory", checks.plans, 120),
    "transformer_l": Part("the paper's Transformer-L, L=13", speed.measure, 70),
    "t_24_8192_16": Part("the paper's T(24,8192,16)", speed.measure, 120),
}


def main() -> int:
    """Runs the command; returns 0 if no part failed."""
    arguments = read(sys.argv[1:])
    if arguments.rows is not None:
        return run_here(arguments.parts[0], arguments)
    started, where = time.monotonic(), "CPU"
    if arguments.device == "cuda":
        where = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    records: Records = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    for name in arguments.parts or open_parts(records, where):
        left = arguments.seconds - (time.monotonic() - started)
        if left < PARTS[name].limit / 2:
            print(f"{name}: no time left; run the same command again")
            continue
        print(f"{name}: {PARTS[name].title} …", flush=True)
        limit = PARTS[name].limit * (1 if arguments.device == "cuda" else TIMES_ON_CPU)
        records[name] = found = {"where": where, **run_apart(name, arguments, min(limit, left))}
        write(records, arguments.output)
        print(f"{name}: {found['status']} after {found['seconds']} s {found['why']}", flush=True)
    print(f"{arguments.output} is written, and a page beside it")
    return int(any(record["status"] != "passed" for record in records.values()))


def read(words: Sequence[str]) -> Namespace:
    options = ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"only these: {', '.join(PARTS)}")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--tiny", action="store_true", help="sizes for tests")
    options.add_argument("--seconds", type=float, default=480, help="for all parts (default: 480)")
    options.add_argument("--output", type=Path, metavar="FILE.json", help="default: docs/measurements/gpu-results.json")
    options.add_argument("--rows", type=Path, help="run one part in this process, for its rows")
    arguments = options.parse_args(words)
    if not PARTS.keys() >= {*arguments.parts}:
        options.error(f"the parts are {', '.join(PARTS)}")
    folder = "docs/measurements" if arguments.device == "cuda" else "build"  # docs/ is for what ran on a GPU
    arguments.output = arguments.output or ROOT / folder / "gpu-results.json"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        options.error("torch finds no GPU here; --device cpu --tiny tries the parts on CPUs")
    return arguments


def open_parts(records: Records, where: str) -> list[str]:
    """Returns the parts never tried on this device with this torch, then those that failed."""
    passed = ("passed", where, torch.__version__)
    settled = {name for name, of in records.items() if (of["status"], of["where"], of["torch"]) == passed}
    return sorted((name for name in PARTS if name not in settled), key=lambda name: name in records)  # stable


def run_apart(name: str, arguments: Namespace, limit: float) -> Row:
    """Runs a part in a process of its own, kills it and its children at the limit, and returns its result."""
    began, folder = time.monotonic(), arguments.output.parent / "gpu-logs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows, output = folder / "rows.jsonl", folder / "output"
    command = [sys.executable, "-m", "benchmarks.gpu", name, "--rows", str(rows), "--device", arguments.device]
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
    said = output.read_text(errors="replace").strip().splitlines()[-LINES_KEPT:]
    status, why = outcome(code, found, said, limit)
    if status == "passed":
        shutil.rmtree(folder, ignore_errors=True)
    else:
        why = f"{why}; logs: {folder}"
    record = {"status": status, "why": why, "torch": torch.__version__, "seconds": round(time.monotonic() - began)}
    return {**record, "date": datetime.now(timezone.utc).date().isoformat(), "rows": found}


def outcome(code: int | None, rows: Sequence[Row], said: Sequence[str], limit: float) -> tuple[str, str]:
    """Returns the status of a part, and why."""
    if code is None:
        return "not finished", f"killed after {limit:.0f} s"
    if code != 0:
        return "failed", "\n".join(said)
    wrong = sum(row.get("ok") is False for row in rows)
    return ("failed", f"{wrong} of {len(rows)} checks are wrong") if wrong else ("passed", "")


def run_here(name: str, arguments: Namespace) -> int:
    """Runs a part in this process and writes each row as it is found."""
    with arguments.rows.open("a", encoding="utf-8") as file:
        for row in PARTS[name].find(Site(name, arguments.device, arguments.tiny, arguments.rows.parent)):
            print(json.dumps(row), file=file, flush=True)
    return 0


def write(records: Mapping[str, Row], path: Path) -> None:
    """Writes the JSON file, and the page, which has its name and ends in .md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(records, indent=1) + "\n")
    lines = ["# What has run on a GPU"]
    for name, record in records.items():
        place = f"{record['where']}, torch {record['torch']}, {record['date']}, {record['seconds']} s"
        lines += [f"## {name}", f"{PARTS[name].title}: **{record['status']}** ({place}) {record['why']}".rstrip()]
        lines.append(table_of(record["rows"]))
    path.with_suffix(".md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
