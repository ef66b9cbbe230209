"""Describes the machine and checks results: against a plain model, at other K, over a resume, and against a plan."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import NamedTuple

import torch
from safetensors.torch import load_file

import gpipe_cli.conf
from benchmarks.common import ROOT, Row
from benchmarks.subject import SUBJECT
from gpipe_cli.benchmarks.tables.workers import environment, machine, run_command
from gpipe_cli.checkpoint.files import latest, step_directories
from gpipe_cli.commands.plan import make_request
from gpipe_cli.json_files import read_rows
from gpipe_cli.planner.measure.this_device import measure_device

SMALL = ("debug=tiny", "logging.tensorboard=false", "trainer.samples=0")
PRECISIONS = Path(next(iter(gpipe_cli.conf.__path__))) / "precision"
TO_PLAN = ("model=transformer_lm_small", "model.L=12", "model.d_model=1024", "model.H=4096", "model.A=16")
REAL_ATTENTION = (*TO_PLAN, "model.L=4", "data.sequence_length=512", "data.batch_size=16")
RESNET = ("model=module", "model.module._target_=torchvision.models.resnet18", "model.module.num_classes=10")
REAL_CONVOLUTIONS = (*RESNET, "data.image_size=224", "data.batch_size=64")
POLL_SECONDS = 0.002
RUN = ("trainer.evaluate_first=false", "trainer.evaluate_every=null", "trainer.samples=0", "logging.every=1")
TO_END = (*SUBJECT, *RUN, "model.odd=slow", "pipeline.partition=auto", "checkpoint.every=1", "checkpoint.keep=1")
KINDS = {  # by remat: the kinds of computation of a cell, each with its field of a plan
    "never": {"forward": "forward", "backward": "backward"},
    "always": {"forward": "inference", "recompute": "recompute", "backward": "backward"},
}
WARM_UP = 4  # steps of a run that is compared with its plan that do not count
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

    def workers(self, most: int) -> int:
        """Returns how many workers a job has that runs on all GPUs, if its model has no more than ``most`` cells."""
        return min(most, max(2, self.gpus))

    def run(self, command: str, words: Sequence[str], codes: Sequence[int] = (0,)) -> str:
        """Runs a command on this site's device, in its folder, and returns its output; see `run_command`."""
        return run_command(command, [f"pipeline.device={self.device}", *words], self.folder, codes)

    def side_by_side(self, work: Callable[[Sequence[str]], Row], cases: Sequence[Sequence[str]]) -> Iterator[Row]:
        """Does ``work`` for every case, on a GPU several at a time: nothing is timed here.

        Yields the results; of a case that fails its cause.
        """

        def attempt(case: Sequence[str]) -> Row:
            try:
                return work(case)
            except (SystemExit, Exception) as error:
                return {"what": " ".join(case), "ok": False, "why": cause_of(str(error))}

        with ThreadPoolExecutor(AT_ONCE if self.device == "cuda" else 1) as threads:
            yield from threads.map(attempt, cases)


def cause_of(said: str) -> str:
    """Returns the last lines of a failure that name it, without the path of a log that comes after them."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("log: ")]
    return "\n".join(lines[-3:])


def machine_facts(site: Site) -> Iterator[Row]:
    """Yields the machine's name and its measured rates of products and copies."""
    yield from ({"what": name, "value": value} for name, value in machine().items())
    for number in range(site.gpus):
        gpu = torch.cuda.get_device_properties(number)
        value = f"{gpu.name}, {gpu.total_memory >> 20:,} MiB, {gpu.multi_processor_count} multiprocessors"
        yield {"what": f"GPU {number}", "value": value}
    rates = measure_device(make_request([f"pipeline.device={site.device}", "pipeline.K=1"]).settings.pipeline)
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
        cases += [("model=transformer", f"pipeline.K={site.workers(8)}", "pipeline.backend=nccl")]

    def verified(words: Sequence[str]) -> Row:
        more = ("verify.steps=2", "verify.format=json")
        report = json.loads(site.run("gpipe-verify", [*SMALL, *words, *more], codes=(0, 1)))
        gradients = [
            q["relative"] or 0.0 for step in report["steps"] for q in step["quantities"] if q["name"] == "gradients"
        ]
        findings = "; ".join(report["findings"])
        return {"what": " ".join(words), "ok": report["agrees"], "gradients differ by": max(gradients), "why": findings}

    yield from site.side_by_side(verified, cases[:2] if site.tiny else cases)


def bits(site: Site) -> Iterator[Row]:
    """Compares runs at K = 1, 2 and 4: real sizes first, then every type of numbers of this release, and compiled."""
    kinds = [f"precision={path.stem}" for path in sorted(PRECISIONS.glob("*.yaml"))]
    cases = [REAL_ATTENTION, (*REAL_ATTENTION, "precision=bf16"), REAL_CONVOLUTIONS, ("model=amoebanet",)]
    cases += [("model=transformer", kind) for kind in [*kinds, "pipeline.compile=true"]]
    for words in [("model=transformer",)] if site.tiny else cases:
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


def commands(site: Site) -> Iterator[Row]:
    """Trains as a user types it, then evaluates and translates: over NCCL with a worker for each of several GPUs."""
    first, workers = site.folder / "first", site.workers(8)
    small = f"gpipe_cli.commands.train {' '.join(SMALL)} model=transformer trainer.steps=4 pipeline.K={workers}"
    cases = [
        "gpipe_cli.commands.train model=transformer trainer.steps=20 trainer.evaluate_every=null",
        f"torch.distributed.run --standalone --nproc-per-node={workers} -m {small}",
        f"{small} hydra.run.dir={first}",
        *(f"{small} {more}" for more in ("precision=bf16", "precision=fp16", "model.tie_embeddings=true")),
        f"{small} pipeline.K={max(1, workers // 2)} pipeline.replicas=2 pipeline.shard_optimizer=true",
    ]
    answers = [f"gpipe_cli.commands.{command} {first}" for command in ("eval", "translate")]

    def run(case: Sequence[str]) -> Row:
        began, line = time.monotonic(), [sys.executable, "-m", *case, f"pipeline.device={site.device}"]
        own = mkdtemp(dir=site.folder)  # names of run directories are seconds
        done = subprocess.run(
            line, input="3 km\n", cwd=own, env=environment(), capture_output=True, text=True, check=False
        )
        why = cause_of(done.stdout + done.stderr) if done.returncode else ""
        return {"what": " ".join(case), "ok": not done.returncode, "seconds": time.monotonic() - began, "why": why}

    for each in [cases[1:2]] if site.tiny else [cases, answers]:
        yield from site.side_by_side(run, [case.split() for case in each])


def ends(site: Site) -> Iterator[Row]:
    """Kills a worker of a run that starts again by itself, and asks a run to stop; yields the seconds to the end."""
    for number, steps, code in ((signal.SIGKILL, 12, 0), (signal.SIGTERM, 10**5, 128 + signal.SIGTERM)):
        folder, K = site.folder / number.name, site.workers(7)
        folder.mkdir(parents=True)
        words = [f"pipeline.K={K}", f"pipeline.workers={K}", f"trainer.steps={steps}", f"hydra.run.dir={folder}"]
        command = [sys.executable, "-m", "gpipe_cli.commands.train", *TO_END, *words, "launch.restarts=1"]
        with (
            (folder / "output").open("wb") as output,
            subprocess.Popen(command, stdout=output, stderr=output, env=environment()) as run,
        ):
            while run.poll() is None and not step_directories(folder):
                time.sleep(POLL_SECONDS)
            began = time.monotonic()
            for process in workers_of(run.pid)[-1:] if number == signal.SIGKILL else [run.pid]:
                with suppress(ProcessLookupError):  # the run has ended by itself, with its cause
                    os.kill(process, number)
        ok, said = run.returncode == code, (folder / "output").read_text()
        yield {"what": number.name, "ok": ok, "seconds": time.monotonic() - began, "why": "" if ok else cause_of(said)}


def workers_of(command: int) -> list[int]:
    """Returns the worker processes of gpipe-train: forks of its child."""
    starters = _of(command, "task/{}/children").split()
    children = [(starter, child) for starter in starters for child in _of(starter, "task/{}/children").split()]
    return [int(child) for starter, child in children if _of(child, "cmdline") == _of(starter, "cmdline")]


def _of(process: int | str, name: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}", name.format(process)).read_text()
    return ""


def same_end(one: Path, other: Path) -> bool:
    """Returns whether two runs agree bit for bit: every tensor of their last checkpoints, and all losses."""
    first, second = latest(one)[0], latest(other)[0]
    assert first is not None and second is not None
    pairs = [(load_file(first.layer_path(layer)), load_file(second.layer_path(layer))) for layer in first.layers]
    same_tensors = all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)
    losses = [[row["loss"] for row in read_rows(of / "metrics.jsonl")[0]] for of in (one, other)]
    return same_tensors and first.step == second.step and losses[0] == losses[1]


def tests(site: Site) -> Iterator[Row]:
    """Runs every test marked gpu; other files, which may need what is not installed there, are not imported."""
    files = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    words = ["-m", "pytest", "-rA", "-q", "--no-header", "--tb=short", "-m", "gpu", "--slow", "--slow", *files]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    for line in done.stdout.splitlines():
        outcome, _, test = line.partition(" ")
        if outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
            ok = outcome == "PASSED" or (outcome, site.device) == ("SKIPPED", "cpu")
            yield {"test": test, "outcome": outcome, "ok": ok}


def plans(site: Site) -> Iterator[Row]:
    """Compares planned and measured cells, bubble (by events on GPUs) and memory."""
    model = ("model=transformer_lm_small", "debug=tiny") if site.tiny else (*TO_PLAN, "precision=bf16")
    for remat in ("never",) if site.tiny else ("never", "always"):
        words, folder = [*model, "pipeline.K=2", "pipeline.M=4", f"pipeline.remat={remat}"], site.folder / remat
        words += ["logging.tensorboard=false", "checkpoint.every=null"]
        plan = json.loads(site.run("gpipe-plan", [*words, "plan.device=this", "plan.format=json"]))
        steps = WARM_UP + (2 if site.tiny else 20)
        site.run("gpipe-train", [*words, *RUN, f"trainer.steps={steps}", f"hydra.run.dir={folder}"])
        rows, _ = read_rows(folder / "metrics.jsonl")
        summary, kinds = json.loads((folder / "summary.json").read_text(encoding="utf-8")), KINDS[remat]
        pairs = {}
        for cell, (kind, field) in product(plan["cells"], kinds.items()):
            taken = median(row["cells"][cell["cell"]].get(kind, 0.0) for row in rows[WARM_UP:]) / plan["M"]
            pairs[f"cell {cell['cell']}, {kind}, ms"] = 1e3 * cell["seconds"][field], 1e3 * taken
        pairs["bubble, %"] = 100 * plan["bubble"], 100 * median(row["bubble"] for row in rows[WARM_UP:])
        pairs["memory, MB"] = plan["memory"] / 1e6, summary["peak_memory_bytes"] / 1e6
        yield from ({"remat": remat, "what": k, "planned": a, "measured": b} for k, (a, b) in pairs.items())
