"""Describes the machine and checks results: against a plain model, at other K, over a resume, and against a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

import gpipe_cli.conf
from benchmarks.common import ROOT, Row, run_command
from benchmarks.kills import same_end
from benchmarks.plan import compare, measured, pair, planned
from gpipe_cli.bench.workers import machine
from gpipe_cli.commands.plan import make_request
from gpipe_cli.planner.measure.this_device import measure_rates

SMALL = ("debug=tiny", "logging.tensorboard=false", "trainer.samples=0")
PRECISIONS = Path(next(iter(gpipe_cli.conf.__path__))) / "precision"
TO_PLAN = ("model=transformer_lm_small", "model.L=12", "model.d_model=1024", "model.H=4096", "model.A=16")
AT_ONCE = 4  # commands that share a GPU where only results matter


class Site(NamedTuple):
    """Describes where a part runs.

    Attributes:
        part: its name.
        device: "cuda", or "cpu" to try the parts without a GPU.
        tiny: sizes for tests.
        folder: a directory for the part's own use.
    """

    part: str
    device: str
    tiny: bool
    folder: Path

    @property
    def gpus(self) -> int:
        return torch.cuda.device_count() if self.device == "cuda" else 0

    def run(self, command: str, words: Sequence[str], codes: Sequence[int] = (0,)) -> str:
        """Runs a command on this site's device, in its folder, and returns its output; see `run_command`."""
        return run_command(command, [f"pipeline.device={self.device}", *words], self.folder, codes)

    def side_by_side(self, work: Callable[[Sequence[str]], Row], cases: Sequence[Sequence[str]]) -> Iterator[Row]:
        """Does ``work`` for every case, on a GPU several at a time: nothing is timed here.

        Yields the results; of a case that fails what it said last.
        """

        def attempt(case: Sequence[str]) -> Row:
            try:
                return work(case)
            except (SystemExit, Exception) as error:
                return {"what": " ".join(case), "ok": False, "why": str(error).strip().rpartition("\n")[2]}

        with ThreadPoolExecutor(AT_ONCE if self.device == "cuda" else 1) as threads:
            yield from threads.map(attempt, cases)


def machine_facts(site: Site) -> Iterator[Row]:
    """Yields what the machine is and what it reaches in products and copies."""
    yield from ({"what": name, "value": value} for name, value in machine().items())
    for number in range(site.gpus):
        yield {"what": f"GPU {number}", "value": str(torch.cuda.get_device_properties(number))}
    rates = measure_rates(make_request([f"pipeline.device={site.device}"]).settings.pipeline)
    yield {"what": "products in float32, TFLOP/s", "value": rates.flops / 1e12}
    yield {"what": "products in bfloat16, TFLOP/s", "value": rates.half_flops / 1e12}
    yield {"what": "memory, GB/s", "value": rates.bandwidth / 1e9}
    yield {"what": "start of an operation, µs", "value": 1e6 * rates.overhead}


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

    def verified(words: Sequence[str]) -> Row:
        more = ("verify.steps=1", "verify.later=3", "verify.format=json")
        report = json.loads(site.run("gpipe-verify", [*SMALL, *words, *more], codes=(0, 1)))
        gradients = [
            q["relative"] or 0.0 for step in report["steps"] for q in step["quantities"] if q["name"] == "gradients"
        ]
        findings = "; ".join(report["findings"])
        return {"what": " ".join(words), "ok": report["agrees"], "gradients differ by": max(gradients), "why": findings}

    yield from site.side_by_side(verified, cases[:2] if site.tiny else cases)


def bits(site: Site) -> Iterator[Row]:
    """Compares runs at K = 1, 2 and 4, in every type of numbers that this release has, and compiled."""
    kinds = [f"precision={path.stem}" for path in sorted(PRECISIONS.glob("*.yaml"))]
    cases = [("model=amoebanet",), *(("model=transformer", kind) for kind in [*kinds, "pipeline.compile=true"])]
    for words in cases[1:2] if site.tiny else cases:
        yield from _same_bits(site, *words)


def _same_bits(site: Site, *words: str) -> Iterator[Row]:
    """Yields for each K, and K=1 again, for kernels that vary, whether losses and weights are those of K=1."""
    shared = ["trainer.evaluate_every=null", f"trainer.steps={2 if site.tiny else 4}", "checkpoint.every=null"]

    def run(case: Sequence[str]) -> Row:
        folder = site.folder / "_".join([*words, *case]).replace("=", "_")
        K = case[0]
        cells = [f"pipeline.K={K}", f"pipeline.workers={K}", f"hydra.run.dir={folder}"]
        site.run("gpipe-train", [*SMALL, *shared, *words, *cells])
        return {"what": " ".join([*words, *case]), "folder": str(folder)}

    first, *others = site.side_by_side(run, [["1"], ["2"]] if site.tiny else [["1"], ["1", "again"], ["2"], ["4"]])
    for other in others:
        if failed := [run for run in (first, other) if "folder" not in run]:
            yield failed[0]
        else:
            yield {"what": other["what"], "ok": same_end(Path(first["folder"]), Path(other["folder"]))}


def tests(site: Site) -> Iterator[Row]:
    """Runs every test marked gpu."""
    words = [
        "-rA",
        "-q",
        "--no-header",
        "--tb=short",
        "-m",
        "gpu",
        "--slow",
        "--slow",
        "-p",
        "no:cacheprovider",
        "tests",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    for line in done.stdout.splitlines():
        outcome, _, test = line.partition(" ")
        if outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
            yield {
                "test": test,
                "outcome": outcome,
                "ok": outcome == "PASSED" or (outcome, site.device) == ("SKIPPED", "cpu"),
            }


def plans(site: Site) -> Iterator[Row]:
    """Compares planned and measured cells, bubble (by events on GPUs) and memory."""
    model = ("model=transformer_lm_small", "debug=tiny") if site.tiny else (*TO_PLAN, "precision=bf16")
    for remat in ("never",) if site.tiny else ("never", "always"):
        words = [*model, "pipeline.K=2", "pipeline.M=4", f"pipeline.remat={remat}", f"pipeline.device={site.device}"]
        words += ["logging.tensorboard=false", "checkpoint.every=null"]
        plan = planned(words)
        steps, summary = measured(words, 2 if site.tiny else 20)
        yield from ({"remat": remat, **row} for row in compare([plan], steps))
        memory = pair("all", "memory, MB", plan["memory"] / 1e6, summary["peak_memory_bytes"] / 1e6)
        yield {"remat": remat, **memory}
