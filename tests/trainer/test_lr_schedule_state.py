"""Tests that a resumed run has the same learning rates, momenta and betas, with every schedule that torch has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.build import build_lr_schedule
from gpipe_cli.trainer.update import replay

FUNCTION = {"_target_": "hydra.utils.get_method", "path": "test_lr_schedule_state.falling"}
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
OF_SCHEDULES = {"ChainedScheduler", "SequentialLR"}  # made of schedules: by functions as those below


def falling(step: int) -> float:
    return 1 / (step + 1)


def one_after_the_other(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    schedules = [lr_scheduler.LambdaLR(optimizer, falling), lr_scheduler.MultiStepLR(optimizer, [2, 3])]
    return lr_scheduler.SequentialLR(optimizer, schedules, [3])


def both_at_once(optimizer: torch.optim.Optimizer) -> lr_scheduler.ChainedScheduler:
    schedules = [lr_scheduler.MultiStepLR(optimizer, [2, 5]), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(schedules)


def make(kind: str, section: dict[str, Any]) -> tuple[torch.optim.Optimizer, Any]:
    """Makes an optimizer of two groups, as with `optimizer.groups`, and its learning-rate schedule."""
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "lr": 0.02}]
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    optimizer = kinds[kind](groups, lr=0.1, **({"momentum": 0.9} if kind == "sgd" else {}))
    return optimizer, build_lr_schedule(section, optimizer)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def course(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[Any]:
    """Returns all settings of the groups after each step."""
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append(settings_of(optimizer))
    return found


SECTIONS = [
    *({"_target_": f"torch.optim.lr_scheduler.{name}", **keys} for name, keys in BY_NAME.items()),
    {"_target_": "test_lr_schedule_state.one_after_the_other"},
    {"_target_": "test_lr_schedule_state.both_at_once"},
]


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section["_target_"].rpartition(".")[2])
def test_a_schedule_goes_on_as_if_it_had_not_stopped(section: dict[str, Any], after: int, kind: str) -> None:
    optimizer, schedule = make(kind, section)
    course(optimizer, schedule, after)
    expected = course(optimizer, schedule, 8)
    optimizer, schedule = make(kind, section)
    replay(schedule, after)
    assert course(optimizer, schedule, 8) == expected


def test_no_schedule_of_torch_is_forgotten_here() -> None:
    found = {name for name, kind in vars(lr_scheduler).items() if isinstance(kind, type) and name[0] != "_"}
    schedules = {name for name in found if issubclass(getattr(lr_scheduler, name), lr_scheduler.LRScheduler)}
    assert schedules == {*BY_NAME, *OF_SCHEDULES, "LRScheduler", "ReduceLROnPlateau"}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch.optim.lr_scheduler.ReduceLROnPlateau", "ReduceLROnPlateau needs metrics at every step"),
        ("builtins.str", "lr_schedule._target_=builtins.str is no subclass of torch.optim.lr_scheduler.LRScheduler"),
    ],
)
def test_what_cannot_work_is_refused_before_training(target: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        make("sgd", {"_target_": target})
    assert message in str(error.value)
