"""Tests going on with a run: what may be changed, its learning rates, and what is still to be evaluated."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import changed, saved
from inline_run import train_inline
from own_model import WORDS, Ending
from refusals import refusal_of
from run_files import rows
from torch import nn
from torch.optim import lr_scheduler

from gpipe_cli.checkpoint.compatibility import require_compatible
from gpipe_cli.checkpoint.files import find, read_manifest, step_directory
from gpipe_cli.checkpoint.writer import CheckpointWriter
from gpipe_cli.factory.build import build_lr_schedule
from gpipe_cli.launch.context import Context
from gpipe_cli.trainer.update import replay


def go_on(folder: Path, *words: str) -> int:
    """Trains for 1 step, goes on to 2; returns where the second run ended."""
    common = (*words, "trainer.evaluate_every=null")
    train_inline(folder / "first", *common, "trainer.steps=1")
    resume = f"checkpoint.resume={step_directory(folder / 'first', 1)}"
    summary, _ = train_inline(folder / "second", *common, "trainer.steps=2", resume)
    return int(summary["steps"])


def test_another_number_of_steps_is_refused_where_a_layer_goes_by_it(tmp_path: Path) -> None:
    said = refusal_of(go_on, tmp_path, *WORDS, "++model.middle=Fading")
    assert "trainer.steps: 1 in the checkpoint, 2 now" in said and "type: trainer.steps=1" in said
    assert "what these layers do (begin_step): middle" in said


@pytest.mark.parametrize(("layer", "more"), [("Counting", ""), ("Fading", "checkpoint.allow_changes=[trainer.steps]")])
def test_elsewhere_a_run_may_become_longer(layer: str, more: str, tmp_path: Path) -> None:
    assert go_on(tmp_path, *WORDS, f"++model.middle={layer}", *more.split()) == 2


def learning_rates(folder: Path, *words: str) -> list[float]:
    """Returns the learning rates of two steps, then of two more with ``words``."""
    common = (*WORDS, "trainer.evaluate_every=null", "optimizer.lr=0.1", "trainer.steps=4", "checkpoint.every=2")
    train_inline(folder / "first", *common)
    resume = f"checkpoint.resume={step_directory(folder / 'first', 2)}"
    train_inline(folder / "second", *common, *words, resume)
    return [row["lr"] for row in rows(folder / "second" / "metrics.jsonl")]


def test_a_learning_rate_that_may_differ_is_the_one_that_trains(tmp_path: Path) -> None:
    change = ("optimizer.lr=0.01", "checkpoint.allow_changes=[optimizer.lr]")
    assert learning_rates(tmp_path, *change) == [0.01, 0.01]


def test_a_schedule_that_may_differ_goes_on_as_if_it_had_always_been(tmp_path: Path) -> None:
    target = "lr_schedule._target_=torch.optim.lr_scheduler.StepLR"
    stairs = (target, "++lr_schedule.step_size=1", "++lr_schedule.gamma=0.5")
    change = (*stairs, "~lr_schedule.warmup_steps", "checkpoint.allow_changes=[lr_schedule]")
    assert learning_rates(tmp_path, *change) == [0.025, 0.0125]


def test_a_run_goes_on_with_another_schedule_of_the_same_bits(tmp_path: Path) -> None:
    common = (*WORDS, "trainer.steps=4", "checkpoint.every=2", "pipeline.K=3", "data.batch_size=18")
    kinds = [f"pipeline.schedule={kind}" for kind in ("1f1b", "zero_bubble")]
    train_inline(tmp_path / "whole", *common, kinds[0])
    resumed = step_directory(tmp_path / "whole", 2)
    train_inline(tmp_path / "other", *common, kinds[1], f"checkpoint.resume={resumed}")
    require_compatible(read_manifest(resumed), read_manifest(step_directory(tmp_path / "other", 4)).state.configuration)
    assert not changed(saved(tmp_path / "whole", 4), saved(tmp_path / "other", 4))


EVERY_STEP = ("++model.middle=Ending", "trainer.evaluate_every=1", "optimizer.lr=0", "trainer.steps=5")


def going_on(run_dir: Path) -> str:
    """Resumes from the newest checkpoint, if there is one."""
    steps = sorted((run_dir / "checkpoints").glob("step_*"))
    return f"checkpoint.resume={steps[-1] if steps else 'null'}"


def evaluated(run_dir: Path) -> list[int]:
    return [row["step"] for row in rows(run_dir / "evaluations.jsonl")]


@pytest.mark.slow
def test_an_evaluation_due_at_the_end_is_made_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for word in WORDS if not word.startswith("trainer.evaluate_every")]
    hears = {"stop_requested": lambda: Ending.asked}
    monkeypatch.setattr("gpipe_cli.launch.supervisor.Context", lambda **given: Context(**{**given, **hears}))
    monkeypatch.setattr(Ending, "at", 1)
    summary, _ = train_inline(tmp_path, *words, *EVERY_STEP)
    assert (summary["steps"], summary["stopped_by"], evaluated(tmp_path)) == (2, "request", [1])
    monkeypatch.setattr(Ending, "at", None)
    monkeypatch.setattr(Ending, "asked", False)
    train_inline(tmp_path, *words, *EVERY_STEP, going_on(tmp_path))
    assert evaluated(tmp_path) == [1, 2, 3, 4, 5]


def test_a_run_killed_after_its_last_evaluation_ends_as_one_never_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*WORDS, "trainer.evaluate_every=2", "optimizer.lr=0", "trainer.steps=5")
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_inline(whole, *words)
    with monkeypatch.context() as killing, pytest.raises(SystemExit):
        killing.setattr(CheckpointWriter, "amend", lambda *_: sys.exit())
        train_inline(run, *words)
    assert evaluated(run) == [2, 4, 5]
    train_inline(run, *words, going_on(run))
    assert evaluated(run) == evaluated(whole)
    assert find(run)[0].state.scalars == find(whole)[0].state.scalars


# -- learning rates, momenta and betas, with every schedule that torch has -------------------------------------------


FUNCTION = {"_target_": "hydra.utils.get_method", "path": "test_resumed_steps.falling"}
BY_NAME: dict[str, dict[str, Any]] = {
    "ConstantLR": {"factor": 0.5, "total_iters": 5},
    "CosineAnnealingLR": {"T_max": 7},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "ExponentialLR": {"gamma": 0.9},
    "LambdaLR": {"lr_lambda": FUNCTION},
    "LinearLR": {"total_iters": 9},
    "MultiplicativeLR": {"lr_lambda": FUNCTION},
    "MultiStepLR": {"milestones": [2, 6, 6, 8], "gamma": 0.5},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 20},
    "PolynomialLR": {"total_iters": 9},
    "StepLR": {"step_size": 3, "gamma": 0.5},
}


def falling(step: int) -> float:
    return 1 / (step + 1)


def one_after_the_other(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    schedules = [lr_scheduler.LambdaLR(optimizer, falling), lr_scheduler.MultiStepLR(optimizer, [2, 3])]
    return lr_scheduler.SequentialLR(optimizer, schedules, [3])


def make(kind: str, section: dict[str, Any]) -> tuple[torch.optim.Optimizer, Any]:
    """Makes an optimizer of two groups, as with `optimizer.groups`, and its learning-rate schedule."""
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "lr": 0.02}]
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    optimizer = kinds[kind](groups, lr=0.1, **({"momentum": 0.9} if kind == "sgd" else {}))
    return optimizer, build_lr_schedule(section, optimizer)


def course(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[Any]:
    """Returns all settings of the groups after each step."""
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append([{key: of for key, of in group.items() if key != "params"} for group in optimizer.param_groups])
    return found


SECTIONS = [
    *({"_target_": f"torch.optim.lr_scheduler.{name}", **keys} for name, keys in BY_NAME.items()),
    {"_target_": "test_resumed_steps.one_after_the_other"},
]


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section["_target_"].rpartition(".")[2])
def test_a_schedule_goes_on_as_if_it_had_not_stopped(section: dict[str, Any], kind: str) -> None:
    optimizer, schedule = make(kind, section)
    course(optimizer, schedule, 4)
    expected = course(optimizer, schedule, 8)
    optimizer, schedule = make(kind, section)
    replay(schedule, 4)
    assert course(optimizer, schedule, 8) == expected


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch.optim.lr_scheduler.ReduceLROnPlateau", "ReduceLROnPlateau needs metrics at every step"),
        ("builtins.str", "lr_schedule._target_=builtins.str is no subclass of torch.optim.lr_scheduler.LRScheduler"),
    ],
)
def test_what_cannot_work_is_refused_before_training(target: str, message: str) -> None:
    assert message in refusal_of(make, "sgd", {"_target_": target})
