"""Tests commands on a device without hardware in the place of GPUs, with gloo in the place of NCCL (standin.py)."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_tools import changed, saved
from run_files import losses, rows
from standin import build

pytestmark = [
    pytest.mark.slow(2),
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="builds an extension of torch"),
]
TINY = ("debug=tiny", "model=transformer", "trainer.steps=3", "logging.tensorboard=false", "trainer.samples=0")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def on_standin(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command where nvidia-smi lists so many of the devices, with more environment variables."""
    found = build(tmp_path_factory.mktemp("standin"))

    def run(name: str, *words: str, code: int = 0, given: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"gpipe_cli.commands.{name}", *words]
        environment = {**os.environ, **found, **{key: str(value) for key, value in more.items()}}
        done = subprocess.run(command, env=environment, input=given, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def one(on_standin: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the run of four cells on one GPU."""
    folder = tmp_path_factory.mktemp("one") / "run"
    on_standin("train", *TINY, "pipeline.K=4", f"hydra.run.dir={folder}")
    return folder


def test_one_gpu_computes_what_a_cpu_does(on_standin: Run, one: Path, tmp_path: Path) -> None:
    on_standin("train", *TINY, "pipeline.device=cpu", f"hydra.run.dir={tmp_path / 'cpu'}")
    assert losses(one) == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)
    on_standin("train", *TINY, "pipeline.K=4", "pipeline.workers=2", f"hydra.run.dir={tmp_path / 'shared'}")
    assert losses(one) == losses(tmp_path / "shared")


@pytest.mark.parametrize("newer", [0, 1], ids=["ProcessGroupNCCL", "ProcessGroupNCCL2"])
def test_several_gpus_start_and_compute_what_one_does(on_standin: Run, one: Path, newer: int, tmp_path: Path) -> None:
    def train(gpus: int, *words: str) -> Path:
        folder = tmp_path / str(gpus)
        chosen = {"STANDIN_GPUS": gpus, "TORCH_DIST_USE_NCCL2": newer}
        done = on_standin("train", *TINY, *words, f"hydra.run.dir={folder}", **chosen)
        assert f"torch's ProcessGroupNCCL{'2' * newer}\n" in done.stdout
        return folder

    assert losses(train(2, "pipeline.K=2")) == losses(one)
    groups = re.findall(r"ProcessGroupNCCL2? of . waits (\d+) s", (tmp_path / "2/workers/rank_0.log").read_text())
    assert groups == ["1800"] * 5
    both = train(4, "pipeline.K=2", "pipeline.replicas=2", "pipeline.shard_optimizer=true")
    assert rows(both / "evaluations.jsonl")


def test_a_run_on_gpus_is_verified_resumed_and_evaluated(on_standin: Run, one: Path, tmp_path: Path) -> None:
    on_standin("verify", *TINY, "model=amoebanet", "pipeline.K=2", STANDIN_GPUS=2)
    again = tmp_path / "again"
    on_standin("train", *TINY, "trainer.steps=4", f"checkpoint.resume={one}", f"hydra.run.dir={again}", STANDIN_GPUS=2)
    assert [row["step"] for row in rows(again / "metrics.jsonl")] == [4]
    on_standin("eval", str(one), STANDIN_GPUS=2)


def test_runs_answer_on_several_gpus_as_on_a_cpu(on_standin: Run, one: Path, tmp_path: Path) -> None:
    model = str(tmp_path / "run")
    on_standin("train", *TINY, "model=transformer_lm_small", f"hydra.run.dir={model}", STANDIN_GPUS=2)
    for words in (("translate", str(one)), ("generate", model, "prompt=The", "length=5", "top_p=0.8")):
        there, here = (
            on_standin(*words, f"pipeline.device={device}", given="3 km\n", STANDIN_GPUS=2)
            for device in ("auto", "cpu")
        )
        assert there.stdout == here.stdout != ""
        assert "(2 GPUs)" in there.stdout + there.stderr


def test_a_full_gpu_says_what_needs_less(on_standin: Run, tmp_path: Path) -> None:
    words = ("pipeline.remat=never", f"hydra.run.dir={tmp_path / 'run'}")
    done = on_standin("train", *TINY, *words, code=1, STANDIN_MEMORY=2_000_000)
    assert "CUDA out of memory" in done.stderr
    assert re.search(r"pipeline\.remat=always.*pipeline\.M.*plan\.fit", done.stderr.splitlines()[-2])


def test_offloaded_cells_have_the_bits_of_resident_ones(on_standin: Run, tmp_path: Path) -> None:
    words = (*TINY, "pipeline.M=2", "pipeline.remat=always", "optimizer=adam", "model.tie_embeddings=true")
    words += ("trainer.gradient_clip=0.5", "trainer.average=0.9", "trainer.evaluate_every=2")
    cells = ("pipeline.K=4", "pipeline.offload=true")

    def train(name: str, *more: str, **environment: int) -> Path:
        on_standin("train", *words, *more, f"hydra.run.dir={tmp_path / name}", **environment)
        return tmp_path / name

    assert not changed(saved(train("offloaded", *cells), 3), saved(train("resident"), 3))
    two = "pipeline.replicas=2"
    several = train("several", *cells, two, "pipeline.workers=2", STANDIN_GPUS=4)
    assert not changed(saved(several, 3), saved(train("replicas", two, STANDIN_GPUS=2), 3))


def test_offloaded_layers_take_the_memory_of_two(on_standin: Run, tmp_path: Path) -> None:
    def peak(L: int) -> float:
        wide = ("model.H=1024", "model.d_model=128", "pipeline.remat=always", f"model.L={L}", f"pipeline.K={2 * L + 2}")
        on_standin("train", *TINY, *wide, "pipeline.offload=true", f"hydra.run.dir={tmp_path / str(L)}")
        return float(rows(tmp_path / str(L) / "metrics.jsonl")[-1]["workers"][0]["memory_bytes"])

    assert peak(4) < 1.05 * peak(2)
