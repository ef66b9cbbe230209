"""Tests that training with cells' state in a file has the bits of training in memory."""

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkpoint_tools import changed, saved
from composed import checked
from inline_run import train_inline
from processes import TRAIN
from refusals import refusal_of

from benchmarks.largest import memory_group
from gpipe_cli.checkpoint.files import step_directory
from gpipe_cli.launch.supervisor import Job, launch

TINY = ("debug=tiny", "pipeline.cost=flops", "pipeline.M=3", "trainer.steps=3", "trainer.evaluate_every=2")
TINY += ("trainer.gradient_clip=0.5", "trainer.average=0.9", "logging.tensorboard=false")
ALONE = ("pipeline.workers=1",)
RUNS = {
    "adam": ("model=transformer", "optimizer=adam", "pipeline.K=4", "pipeline.remat=always"),
    "muon": ("model=transformer", "optimizer=muon", "pipeline.K=3", "pipeline.schedule=breadth_first"),
    "batchnorm": ("model=amoebanet", "pipeline.K=2", "pipeline.remat=never"),
    "bf16": ("model=transformer", "optimizer=adafactor", "precision=bf16", "pipeline.K=3"),
}


def in_file(folder: Path) -> tuple[str, ...]:
    return "pipeline.offload=true", f"pipeline.offload_dir={folder}"


@pytest.mark.parametrize("run", ["adam", *(pytest.param(r, marks=pytest.mark.slow) for r in [*RUNS][1:])])
def test_no_bit_differs_from_training_in_memory(tmp_path: Path, run: str) -> None:
    evaluations = []
    for name, more in {"memory": ("pipeline.K=1",), "file": in_file(tmp_path)}.items():
        summary, _ = train_inline(tmp_path / name, *TINY, *ALONE, *RUNS[run], *more)
        evaluations.append(summary["evaluation"])
    assert evaluations[0] == evaluations[1]
    assert not changed(saved(tmp_path / "file", 3), saved(tmp_path / "memory", 3))


def test_a_run_goes_on_in_memory_and_in_a_file(tmp_path: Path) -> None:
    words = (*TINY, *ALONE, "optimizer=adam", "pipeline.K=2", "checkpoint.every=1", "checkpoint.keep=3")
    train_inline(tmp_path / "whole", *words, *in_file(tmp_path))
    for number, more in enumerate((in_file(tmp_path), ()), 1):
        resume = f"checkpoint.resume={step_directory(tmp_path / 'whole', number)}"
        train_inline(tmp_path / str(number), *words, *more, resume)
        assert not changed(saved(tmp_path / str(number), 3), saved(tmp_path / "whole", 3))


@pytest.mark.slow
def test_workers_and_replicas_have_the_same_bits(tmp_path: Path) -> None:
    words = (*TINY, "optimizer=adam", "pipeline.K=4", "pipeline.workers=2", "pipeline.replicas=2", "pipeline.M=2")
    for name, more in {"file": in_file(tmp_path), "memory": ()}.items():
        content = {"settings": checked(*words, *more).config, "started_at": time.time()}
        (tmp_path / name).mkdir()
        preload = ("torch", "gpipe_cli.trainer.run")
        launch(Job(tmp_path / name, 4, "gpipe_cli.trainer.run:main", content, preload), lambda event: None)
    assert not changed(saved(tmp_path / "file", 3), saved(tmp_path / "memory", 3))


@pytest.mark.slow(2)
@pytest.mark.timeout(1200)
def test_a_model_of_950_megabytes_trains_in_800_of_which_python_takes_half(tmp_path: Path) -> None:
    sizes = ["model.L=8", "model.H=2048", "model.A=8", "model.d_model=512", "pipeline.K=16", "pipeline.remat=always"]
    words = [*TINY, *ALONE, *sizes, "pipeline.M=2", "trainer.average=null", "optimizer=adam", "trainer.steps=1"]
    words += ["trainer.evaluate_every=null", "trainer.evaluate_first=false", "task.generation=null"]
    words += ["launch.inline=true", f"hydra.run.dir={tmp_path / 'run'}"]
    with ExitStack() as stack:
        try:
            prefix = stack.enter_context(memory_group(800 << 20))
        except PermissionError as error:
            pytest.skip(str(error))

        def train(*more: str) -> "subprocess.CompletedProcess[str]":
            typed = [*prefix, sys.executable, *TRAIN, *words, *more]
            return subprocess.run(typed, capture_output=True, text=True)

        assert "take 1.0 GB; there are 0.8 GB" in train().stderr
        ran = train(*in_file(tmp_path))
    assert ran.returncode == 0, ran.stderr


def test_a_kind_that_turns_to_and_fro_is_refused_before_workers_start() -> None:
    words = (*TINY, "pipeline.offload=true", "pipeline.schedule=1f1b", "pipeline.K=3", "pipeline.workers=1")
    assert "use gpipe or breadth_first, or pipeline.K=1" in refusal_of(checked, *words)


@pytest.mark.parametrize("word", ["pipeline.compile=true", "pipeline.shard_optimizer=true"])
def test_what_does_not_go_with_offload_is_refused_by_its_key(word: str) -> None:
    said = f"pipeline.offload=true does not go with {word.partition('=')[0]} yet"
    assert said in refusal_of(checked, *TINY, "pipeline.offload=true", word)
