"""Runs `gpipe-train` on disks that are full, read-only, without inodes or removed, one fault at a time.

Each run has two workers, four steps and a checkpoint every second step. Its fault is mounted in a mount namespace of
its own, so this needs root on Linux. A run passes when it fails (exit code 1) in one line on standard error, or goes
on with a warning; either names the file, the reason and the room that is left. Otherwise the exit code is 1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.common import Row, environment
from benchmarks.reliability.cases import try_cases

WORDS = (
    *("debug=tiny", "pipeline.K=2", "pipeline.workers=2", "trainer.steps=4", "trainer.evaluate_every=2"),
    *("checkpoint.every=2", "hydra.run.dir=run"),
)
# Shell functions: a full disk at a folder, a file on a full disk, and something that happens after the first step.
SHELL = """
fill() { cat /dev/zero > "$1" 2> /dev/null; true; }
disk() { mkdir -p "$1" && mount -t tmpfs -o "$2" none "$1"; }
full() { disk "$1" size=8k && fill "$1/filler"; }
file() { disk other size=8k && : > other/file && fill other/filler && : > "$1" && mount --bind other/file "$1"; }
later() { (while [ ! -s run/metrics.jsonl ]; do sleep 0.1; done; "$@") & }
mkdir run
"""
FAILS, WARNS, PASSES = "fails", "warns", "goes on"
CASES = {  # what the shell does before the command, and how the command ends
    "run directory full": ("full run", FAILS),
    "run directory read-only": ("disk run ro", FAILS),
    "run directory without inodes": ("disk run nr_inodes=1", FAILS),
    "room for the start only": ("disk run size=900k", FAILS),
    "inodes for the start only": ("disk run nr_inodes=35", FAILS),
    "run directory becomes full": ("disk run size=4m; later fill run/filler", FAILS),
    "run directory removed": ("later rm -rf run", FAILS),
    "run directory moved": ("later mv run elsewhere", FAILS),
    "files of at most 100 KiB (RLIMIT_FSIZE)": ("ulimit -f 100", FAILS),
    "`.hydra/` full": ("full run/.hydra", FAILS),
    "`train.log` full": ("file run/train.log", WARNS),
    "`workers/` full": ("full run/workers", PASSES),
    "`workers/` becomes full": ("disk run/workers size=64k; later fill run/workers/filler", PASSES),
    "`metrics.jsonl` full": ("file run/metrics.jsonl", FAILS),
    "`evaluations.jsonl` full": ("file run/evaluations.jsonl", FAILS),
    "`summary.json` cannot be replaced": ("file run/summary.json", FAILS),
    "`checkpoints/` full": ("disk run/checkpoints size=300k", FAILS),
    "`checkpoints/` read-only": ("disk run/checkpoints ro", FAILS),
    "`tensorboard/` full": ("full run/tensorboard", WARNS),
    "`pictures/` full": ("full run/pictures", WARNS),
    "corpus cache full": ("full cache; export GPIPE_CACHE=cache", FAILS),
    "corpus cache read-only": ("disk cache ro; export GPIPE_CACHE=cache", FAILS),
    "no corpus cache": (": > cache; export GPIPE_CACHE=cache/below", FAILS),
    "`/tmp` full": ("full tmp; export TMPDIR=$PWD/tmp", PASSES),
    "`/dev/shm` full": ("full /dev/shm; export GPIPE_CACHE=$PWD/cache", PASSES),
}


def run(case: str, folder: Path) -> Row:
    """Runs the command with one fault and returns what it printed."""
    before, ending = CASES[case]
    command = f'{SHELL}\n{before}\nexec "$0" -m gpipe_cli.commands.train "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", command, sys.executable, *WORDS],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    errors = done.stderr.splitlines()
    warnings = [line for line in done.stdout.splitlines() if "cannot be written: " in line]
    passed = {
        FAILS: done.returncode == 1 and len(errors) == 1 and "cannot be written: " in errors[0],
        WARNS: done.returncode == 0 and not errors and len(warnings) > 0,
        PASSES: done.returncode == 0 and not errors,
    }[ending]
    said = next(iter([*(errors or warnings), ""])).removeprefix("warning: ").replace(f"{folder}/", "")
    return {"exit code": done.returncode, "message": said, "as promised": "yes" if passed else "NO"}


if __name__ == "__main__":
    try_cases(__doc__, {"exit code": "d", "message": "s"}, list(CASES), 12, run)
