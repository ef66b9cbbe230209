"""Tests that gpipe-verify's own seeds, rates and updates are the trainer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.factory.build import build_optimizer
from gpipe_cli.factory.groups import Groups
from gpipe_cli.pipeline.randomness import NoiseSource, weights_of_layer
from gpipe_cli.verify.plain import learning_rate, noise_seed, update, update_seed, weights_drawn

RATES = "gpipe_cli.optim.lr_schedules"
SGD = {"_target_": "torch.optim.SGD", "lr": 0.5}


def test_seeds_are_those_of_the_trainer() -> None:
    source = NoiseSource(5, 1, torch.device("cpu"))
    assert source.seeds(3, 2, [0, 7, 8, 40]) == [noise_seed(2, 5, 3, 1, 2, layer) for layer in (0, 7, 8, 40)]
    assert source.evaluation_seeds((0, 0), 2, [9]) == [noise_seed(4, 5, 0, 0, 1, 2, 9)]
    assert source.update_seed(3, "a.weight") == update_seed(5, 3, "a.weight")
    with weights_of_layer(5, 3):
        theirs = torch.rand(4)
    with weights_drawn(5, 3):
        assert torch.equal(torch.rand(4), theirs)


def test_rates_are_those_of_a_schedule_asked_from_its_beginning() -> None:
    schedule = {"_target_": f"{RATES}.inverse_sqrt", "warmup_steps": 8}
    assert [learning_rate(SGD, schedule, n) for n in (1, 8, 32)] == pytest.approx([0.5 / 8, 0.5, 0.25])


@pytest.mark.parametrize("groups", [[], [{"only": "vectors", "weight_decay": 0.0, "lr_factor": 2}]])
def test_updates_are_those_of_the_optimizer(groups: list[Any]) -> None:
    """Three updates of a matrix and of a vector, in one optimizer and alone."""
    target = "gpipe_cli.optim.optimizers.TFRMSprop"
    section: dict[str, Any] = {"_target_": target, "lr": 0.1, "weight_decay": 0.3, "groups": groups}
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(4))]
    alone: list[tuple[torch.Tensor, Any]] = [(parameter.detach().clone(), {}) for parameter in parameters]
    keys = [Groups(section).key(name, p.shape) for name, p in zip("ab", parameters, strict=True)]
    optimizer = build_optimizer(section, Groups(section).divided(zip("ab", parameters, strict=True)))
    for _ in range(3):
        for place, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter)
            rate = learning_rate(section, {"_target_": f"{RATES}.constant"}, 2, keys[place])
            alone[place] = update(section, keys[place], rate, *alone[place], parameter.grad)
        optimizer.step()
    for parameter, (weight, state) in zip(parameters, alone, strict=True):
        torch.testing.assert_close(weight, parameter.detach())
        assert state.keys() == optimizer.state[parameter].keys()
