"""Tests that gpipe-verify's own reference agrees with the trainer's seeds, rates and updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.factory.build import build_lr_schedule, build_optimizer
from gpipe_cli.pipeline.randomness import NoiseSource, weights_of_layer
from gpipe_cli.verify.reference import FACTORS, Update, learning_rate, noise_seed, peak_rate, update, weights_drawn

SCHEDULES: dict[str, dict[str, Any]] = {
    "inverse_sqrt": {"warmup_steps": 7},
    "transformer": {"warmup_steps": 7, "d_model": 16, "factor": 2.0},
    "cosine": {"warmup_steps": 3, "steps": 30, "final": 0.1},
    "cosine of a run shorter than two warm-ups": {"warmup_steps": 20, "steps": 30},
    "cosine of a run as long as its warm-up": {"warmup_steps": 30, "steps": 30},
    "constant": {"warmup_steps": 5},
    "exponential": {"rate": 0.9, "decay_every": 2.4, "warmup_steps": 4, "floor": 0.3},
    "exponential_epochs": {
        "rate": 0.9,
        "decay_epochs": 1.5,
        "warmup_epochs": 2,
        "floor": 0.1,
        "examples": 100,
        "batch_size": 32,
    },
}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.5}


def test_seeds_are_those_of_the_trainer() -> None:
    source = NoiseSource(5, 1, torch.device("cpu"))
    assert source.seeds(3, 2, [0, 7, 8, 40]) == [noise_seed(5, 3, 1, 2, layer) for layer in (0, 7, 8, 40)]
    with weights_of_layer(5, 3):
        theirs = torch.rand(4)
    with weights_drawn(5, 3):
        assert torch.equal(torch.rand(4), theirs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_formulas_are_the_learning_rates_of_the_schedules(name: str) -> None:
    section = {"_target_": f"gpipe_cli.optim.lr_schedules.{name.split()[0]}", **SCHEDULES[name]}
    assert section["_target_"] in FACTORS
    optimizer = build_optimizer(SGD, [nn.Parameter(torch.zeros(2, 2))])
    schedule, rates = build_lr_schedule(section, optimizer), []
    for n in range(1, 41):
        rates.append(schedule.get_last_lr()[0])
        assert learning_rate(SGD, section, n) == pytest.approx(rates[-1], rel=1e-12)
        optimizer.step()
        schedule.step()
    assert peak_rate(SGD, section, 40) == pytest.approx(max(rates), rel=1e-12)


@pytest.mark.parametrize(
    "section",
    [
        {"_target_": "gpipe_cli.optim.optimizers.TFRMSprop", "lr": 0.1, "weight_decay": 0.3, "decay_only": "matrices"},
        {"_target_": "gpipe_cli.optim.adafactor.Adafactor", "lr": 0.1, "weight_decay": 0.3, "parameter_scale": True},
        {"_target_": "gpipe_cli.optim.adafactor.Adafactor", "lr": 0.1, "beta1": 0.0, "beta2": 0.9, "clip": None},
        {
            "_target_": "torch.optim.AdamW",
            "lr": 0.1,
            "betas": [0.8, 0.9],
            "weight_decay": 0.3,
            "decay_only": "matrices",
        },
    ],
)
def test_updates_are_those_of_the_optimizers(section: dict[str, Any]) -> None:
    """Three updates of a matrix and of a vector, in one optimizer and alone."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(4))]
    alone = [Update(parameter.detach().clone(), {}) for parameter in parameters]
    optimizer = build_optimizer(section, parameters)
    for _ in range(3):
        for place, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter)
            alone[place] = update(section, section["lr"], alone[place], parameter.grad)
        optimizer.step()
    for parameter, own in zip(parameters, alone, strict=True):
        torch.testing.assert_close(own.weight, parameter.detach())
        assert own.state.keys() == optimizer.state[parameter].keys()
