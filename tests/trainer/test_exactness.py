"""Tests that `gpipe-train` gives the same bits at every K, as processes or as one, resumed or not, with ties or not."""

import signal
import sys
from pathlib import Path

import own_model
import pytest
import torch
from checkpoint_tools import changed, saved
from inline_run import train_inline
from processes import TORCHRUN, TRAIN, command, run, signalled, succeeded
from run_files import losses, rows

from gpipe_cli.checkpoint.files import open_checkpoint, step_directory
from gpipe_cli.checkpoint.layer_state import export_state_dict

COMMON = [
    *("debug=tiny", "trainer.steps=20", "trainer.evaluate_every=10", "checkpoint.every=5", "model.dropout=0.1"),
    *("model.input_dropout=0.1", "model.attention_dropout=0.1", "model.tie_embeddings=true", "task.generation=null"),
    "logging.tensorboard=false",
]
WHOLE = ["pipeline.K=1", "pipeline.workers=1"]


def train(folder: Path, *words: str) -> Path:
    """Trains in ``folder`` and returns the run directory: one worker in this process, several by the command."""
    folder.mkdir(exist_ok=True)
    run_dir = folder / "run"
    if "pipeline.workers=1" in words and not any(word.startswith("pipeline.replicas=") for word in words):
        train_inline(run_dir, *COMMON, *words)
        return run_dir
    succeeded(command("train", *COMMON, f"hydra.run.dir={run_dir}", *words, cwd=folder))
    return run_dir


def same_bits(one: Path, other: Path, step: int = 20) -> bool:
    """Returns whether the last checkpoints agree bit for bit: weights, buffers, optimizer state of every layer."""
    return not changed(saved(one, step), saved(other, step))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains the reference: one cell, one worker, never stopped."""
    return train(tmp_path_factory.mktemp("whole"), *WHOLE)


def test_every_k_gives_the_same_bits(whole: Path, tmp_path: Path) -> None:
    words = ("pipeline.K=8", "pipeline.workers=3", "pipeline.remat=never", "pipeline.partition=min_variance")
    run_dir = train(tmp_path, *words)
    assert losses(run_dir) == losses(whole)
    assert same_bits(run_dir, whole)


@pytest.mark.slow(2)
def test_a_divided_optimizer_state_and_early_sums_change_no_bit_and_no_checkpoint(tmp_path: Path) -> None:
    """Over gloo, where a cell's gradients are summed up while the worker's other cells still run."""
    words = ["trainer.steps=4", "pipeline.replicas=3", "pipeline.M=2", "data.batch_size=24", "checkpoint.every=2"]
    whole = train(tmp_path / "whole", *words, "pipeline.K=1", "pipeline.workers=1")
    divided = [*words, "pipeline.shard_optimizer=true", "pipeline.workers=1"]
    run_dir = train(tmp_path / "divided", *divided, "pipeline.K=4", "pipeline.backend=gloo")
    assert losses(run_dir) == losses(whole)
    assert all(same_bits(run_dir, whole, step) for step in (2, 4))
    resume = f"checkpoint.resume={step_directory(run_dir, 2)}"
    resumed = train(tmp_path / "resumed", *divided, "pipeline.K=2", resume)
    assert same_bits(resumed, whole, step=4)


def test_a_killed_run_goes_on_at_another_k_as_if_it_had_never_stopped(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [sys.executable, *TRAIN, *COMMON, f"hydra.run.dir={run_dir}", "pipeline.K=2", "pipeline.workers=2"]
    signalled(words, run_dir, 12, signal.SIGKILL)
    resumed = train(tmp_path, "pipeline.K=4", "pipeline.workers=3", "checkpoint.resume=auto")
    assert losses(resumed) == losses(whole)
    assert same_bits(resumed, whole)


@pytest.mark.slow(2)
def test_torchrun_s_processes_save_when_asked_to_stop_and_go_on_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [*TORCHRUN, *TRAIN, *COMMON, f"hydra.run.dir={run_dir}", "pipeline.K=4", "checkpoint.every=null"]
    assert signalled(words, run_dir, 3, signal.SIGTERM) != 0
    assert 3 <= len(losses(run_dir)) < 20
    assert list((run_dir / "checkpoints").glob("step_*/manifest.json"))
    assert {path.name for path in (run_dir / "workers").iterdir()} == {"rank_0.log", "rank_1.log"}
    succeeded(run(*words, "checkpoint.resume=auto", cwd=tmp_path))
    assert losses(run_dir) == losses(whole)
    assert same_bits(run_dir, whole)


@pytest.mark.slow
def test_two_replicas_train_as_one_pipeline_on_the_joined_mini_batch(tmp_path: Path) -> None:
    """The same micro-batches, read by two first workers; only the order of summation differs."""
    common = ["model.dropout=0", "model.input_dropout=0", "model.attention_dropout=0"]
    common += ["pipeline.K=2", "data.batch_size=30", "trainer.steps=6", "trainer.evaluate_every=6"]
    one = train(tmp_path / "one", *common, "pipeline.workers=1", "pipeline.M=4")
    two = train(tmp_path / "two", *common, "pipeline.workers=2", "pipeline.M=2", "pipeline.replicas=2")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    first, last = ([rows(run / "evaluations.jsonl")[place]["nll"] for run in (one, two)] for place in (0, -1))
    assert first[1] == pytest.approx(first[0], rel=1e-5)
    assert last[1] == pytest.approx(last[0], rel=1e-3)


# -- tied parameters -------------------------------------------------------------------------------------------------


STEPS = 3
TIED = (
    *(*own_model.WORDS, "model._target_=own_model.with_ties", "optimizer=adam", "optimizer.lr=0.01", "pipeline.M=3"),
    *("trainer.average=0.9", "trainer.gradient_clip=0.1", "checkpoint.every=1", "checkpoint.keep=9"),
)
NAMES = ("first.weight", "back.weight", "last.weight")


def trained(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    """Returns all that the last checkpoint holds."""
    train_inline(folder, *TIED, f"trainer.steps={STEPS}", *words)
    return saved(folder, STEPS)


@pytest.fixture(scope="module")
def tied_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains with one cell."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    trained(folder, "pipeline.K=1")
    return folder


def test_every_cut_gives_the_same_files_and_evaluations_change_nothing(tmp_path: Path, tied_run: Path) -> None:
    """Each of the three layers that use the parameter is on a worker of its own."""
    words = (f"trainer.steps={STEPS}", "pipeline.K=4", "pipeline.partition=[2,1,1,1]", "pipeline.workers=3")
    more = ("pipeline.remat=always", "trainer.evaluate_every=1", "logging.tensorboard=false")
    succeeded(command("train", *TIED, *words, *more, f"hydra.run.dir={tmp_path}"))
    assert not changed(saved(tmp_path, STEPS), saved(tied_run, STEPS))


def test_modules_that_builders_share_train_as_declared_ties_do_at_every_cut(tmp_path: Path) -> None:
    words = ("+model.kind=shared", "pipeline.schedule=zero_bubble")
    one, five = (trained(tmp_path / K, f"pipeline.K={K}", *words) for K in "15")
    assert not changed(one, five)
    layers = open_checkpoint(step_directory(tmp_path / "1", STEPS)).layers.values()
    assert [file.tied for file in layers] == [{}, {}, {}, *[{"weight": ("first", "weight")}] * 2]


def test_a_checkpoint_holds_a_tied_parameter_once_and_an_export_under_every_name(tied_run: Path) -> None:
    held = {name for name in saved(tied_run, STEPS) if name.endswith(":weight") and not name.startswith("middle")}
    kinds = ("weight", "average", *(f"optimizer:{key}" for key in ("step", "exp_avg", "exp_avg_sq")))
    assert held == {f"first/{kind}:weight" for kind in kinds}
    for average in (False, True):
        exported = export_state_dict(open_checkpoint(step_directory(tied_run, STEPS)), average)
        assert all(torch.equal(exported[name], exported[NAMES[0]]) for name in NAMES)


def test_a_resume_at_another_k_gives_the_same_files(tmp_path: Path, tied_run: Path) -> None:
    start = f"checkpoint.resume={step_directory(tied_run, 1)}"
    assert not changed(trained(tmp_path / "rest", "pipeline.K=4", start), saved(tied_run, STEPS))


def test_a_frozen_tied_parameter_stays_what_its_owner_drew(tmp_path: Path) -> None:
    trained(tmp_path / "tied_run", "+model.kind=frozen", "optimizer.weight_decay=0.1", "pipeline.K=3")
    folders = (step_directory(tmp_path / "tied_run", step) for step in (1, STEPS))
    first, last = (export_state_dict(open_checkpoint(folder)) for folder in folders)
    assert all(torch.equal(last[name], first[NAMES[0]]) for name in NAMES)
    assert not torch.equal(last["middle.weight"], first["middle.weight"])
