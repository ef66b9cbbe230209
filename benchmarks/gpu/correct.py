"""Checks results: against a plain model by name, bit for bit at other K, and over a resume on another device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import gpipe_cli.conf
from benchmarks.common import ROOT
from benchmarks.reliability.kills import same_end
from gpipe_cli.checkpoint.files import step_directories, step_of

from .part import Row, Site, Skipped

SMALL = ("debug=tiny", "logging.tensorboard=false", "trainer.samples=0")
CONFIGURATIONS = Path(next(iter(gpipe_cli.conf.__path__)))
PATIENCE_SECONDS = 60.0


# -- against the plain model -------------------------------------------------------------------------------------------


def exact(site: Site) -> Iterator[Row]:
    """Compares real steps with a plain loop, every gradient by name, with a worker for each cell."""
    cases = [
        ("model=transformer", "pipeline.K=1", "pipeline.workers=1"),
        ("model=transformer", "pipeline.K=2", "pipeline.workers=2"),
        ("model=transformer", "pipeline.K=4", "pipeline.workers=4"),
        ("model=amoebanet", "pipeline.K=4", "pipeline.workers=4"),
        ("model=transformer_lm", "pipeline.K=4", "pipeline.workers=4", "pipeline.schedule=zero_bubble"),
        ("model=transformer", "pipeline.K=4", "pipeline.workers=2", "pipeline.schedule=interleaved_1f1b"),
        ("model=transformer", "pipeline.K=4", "pipeline.workers=4", "pipeline.schedule=1f1b", "pipeline.remat=always"),
        ("model=transformer", "pipeline.K=2", "pipeline.workers=2", "pipeline.replicas=2"),
    ]
    if site.gpus > 1:  # each worker its own GPU: NCCL; above, several may share one
        cases += [("model=transformer", f"pipeline.K={site.gpus}", "pipeline.backend=nccl")]
    yield from site.side_by_side(lambda words: _verified(site, words), cases[:2] if site.tiny else cases)


def _verified(site: Site, words: Sequence[str]) -> Row:
    more = ("verify.steps=1", "verify.later=3", "verify.format=json")
    report = json.loads(site.run("gpipe-verify", [*SMALL, *words, *more], codes=(0, 1)))
    quantities = [quantity for step in report["steps"] for quantity in step["quantities"]]
    worst = max((q["relative"] or 0.0 for q in quantities if q["name"] == "gradients"), default=None)
    findings = "; ".join(report["findings"])
    return {"what": " ".join(words), "ok": report["agrees"], "gradients differ by": worst, "findings": findings}


# -- bit for bit -------------------------------------------------------------------------------------------------------


def bits(site: Site) -> Iterator[Row]:
    """Compares runs at K = 1, 2 and 4: all losses and weights; and one more at K=1, for kernels that vary."""
    yield from _same_bits(site, "model=transformer")
    if not site.tiny:
        yield from _same_bits(site, "model=amoebanet")


def precision(site: Site) -> Iterator[Row]:
    """Compares runs at K = 1, 2 and 4 in the other types of numbers that this release has, and compiled."""
    kinds = [path.stem for path in sorted((CONFIGURATIONS / "precision").glob("*.yaml")) if path.stem != "fp32"]
    for kind in kinds[:1] if site.tiny else kinds:
        yield from _same_bits(site, "model=transformer", f"precision={kind}")
    if not site.tiny:  # a compiler takes minutes on a CPU
        yield from _same_bits(site, "model=transformer", "pipeline.compile=true")


def _same_bits(site: Site, *words: str) -> Iterator[Row]:
    """Yields for each K whether the run has the losses and weights of the run at K=1."""
    steps = 2 if site.tiny else 4
    shared = ["trainer.evaluate_every=null", f"trainer.steps={steps}", "checkpoint.every=null"]

    def run(K: str) -> Row:
        cells = ["pipeline.K=1"] if K == "1 again" else [f"pipeline.K={K}", f"pipeline.workers={K}"]
        folder = site.folder / f"{'_'.join(words)} {K}".replace("=", "_").replace(" ", "_")
        site.run("gpipe-train", [*SMALL, *shared, *words, *cells, f"hydra.run.dir={folder}"])
        return {"K": K, "folder": str(folder)}

    first, *others = site.side_by_side(run, ["1", "2"] if site.tiny else ["1", "1 again", "2", "4"])
    for other in others:
        same = same_end(Path(first["folder"]), Path(other["folder"]))
        yield {"what": " ".join(words), "K": other["K"], "bits of K=1": "yes" if same else "no", "ok": same}


# -- kill and resume ---------------------------------------------------------------------------------------------------


def resume(site: Site) -> Iterator[Row]:
    """Kills a run on the device, goes on on the CPU, then on the device; compares losses with an undisturbed run."""
    shared = [*SMALL, "trainer.evaluate_every=null", "checkpoint.every=2", "pipeline.K=2", "pipeline.workers=2"]
    whole, killed = site.folder / "whole", site.folder / "killed"
    site.run("gpipe-train", [*shared, "trainer.steps=8", f"hydra.run.dir={whole}"])
    step = _kill(site, [*shared, "trainer.steps=100000", f"hydra.run.dir={killed}"], killed)
    yield {"what": f"killed on {site.device}", "saved step": step, "ok": step > 0}
    until = step
    for device in ("cpu", site.device):
        until += 2
        words = ["checkpoint.resume=auto", f"hydra.run.dir={killed}", f"pipeline.device={device}"]
        site.run("gpipe-train", [*shared, *words, f"trainer.steps={until}"])
        losses, expected = _losses(killed), _losses(whole)
        both = [(losses[number], expected[number]) for number in losses if number in expected]
        far = max(abs(one / other - 1) for one, other in both)
        yield {"what": f"gone on, on {device}", "steps": until, "loss differs by": far, "ok": until in losses}


def _kill(site: Site, words: Sequence[str], run_dir: Path) -> int:
    """Starts a run, kills its command after the first checkpoint, and returns that checkpoint's step.

    The run is in the process group of the part, which is killed with the part; a killed command's workers end by
    themselves.
    """
    command = [sys.executable, "-m", "gpipe_cli.commands.train", *words, f"pipeline.device={site.device}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command,
        cwd=site.folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + PATIENCE_SECONDS
    while not step_directories(run_dir) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    if process.poll() is None:
        process.kill()
    process.wait()
    saved = step_directories(run_dir)
    return step_of(saved[-1]) if saved else 0


def _losses(run_dir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


# -- tests -------------------------------------------------------------------------------------------------------------


def tests(site: Site) -> Iterator[Row]:
    """Runs every test marked gpu."""
    if find_spec("pytest") is None or not (ROOT / "tests").is_dir():
        raise Skipped("needs pytest and the folder tests")
    report = site.folder / "tests.xml"
    words = ["-q", "-m", "gpu", "--slow", "--slow", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    words += [f"--junitxml={report}", "tests"]
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False)
    for case in xml.parse(report).iter("testcase"):
        outcome = next((each.tag for each in case if each.tag in ("failure", "error", "skipped")), "passed")
        row = {"test": f"{case.get('classname')}.{case.get('name')}", "outcome": outcome}
        yield row if outcome == "skipped" and site.device == "cpu" else {**row, "ok": outcome == "passed"}
