"""Checks results: against a plain model by name, bit for bit at other K, and over a resume on another device."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import gpipe_cli.conf
from benchmarks.common import ROOT
from benchmarks.reliability.kills import losses, same_end

from .part import Row, Site, Skipped

SMALL = ("debug=tiny", "logging.tensorboard=false", "trainer.samples=0")
CONFIGURATIONS = Path(next(iter(gpipe_cli.conf.__path__)))


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
        if failed := [run for run in (first, other) if "folder" not in run]:
            yield failed[0]
            continue
        same = same_end(Path(first["folder"]), Path(other["folder"]))
        yield {"what": " ".join(words), "K": other["K"], "bits of K=1": "yes" if same else "no", "ok": same}


# -- resume ------------------------------------------------------------------------------------------------------------


def resume(site: Site) -> Iterator[Row]:
    """Begins a run on the device, goes on on the CPU, then on the device; compares losses with an undisturbed run."""
    shared = [*SMALL, "trainer.evaluate_every=null", "pipeline.K=2", "pipeline.workers=2"]
    whole, moved = site.folder / "whole", site.folder / "moved"
    site.run("gpipe-train", [*shared, "trainer.steps=6", f"hydra.run.dir={whole}"])
    expected = losses(whole)
    for device, steps in ((site.device, 2), ("cpu", 4), (site.device, 6)):
        words = ["checkpoint.resume=auto", f"hydra.run.dir={moved}", f"pipeline.device={device}"]
        site.run("gpipe-train", [*shared, *words, f"trainer.steps={steps}"])
        found = losses(moved)
        far = max(abs(loss / other - 1) for loss, other in zip(found, expected, strict=False))
        yield {"on": device, "steps": len(found), "loss differs by": far, "ok": len(found) == steps}


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
