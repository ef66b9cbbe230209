"""Tests optimizers that draw random numbers."""

from __future__ import annotations

import torch
from noisy_model import Langevin
from torch import Tensor, nn

from gpipe_cli.optim.noise import SeededUpdates
from gpipe_cli.pipeline.randomness import NoiseSource


def updated(cuts: list[list[str]]) -> dict[str, Tensor]:
    """Returns parameters after two updates by one optimizer for each list of names."""
    parameters = {name: nn.Parameter(torch.ones(3)) for names in cuts for name in names}
    noise = NoiseSource(1, 0, torch.device("cpu"))
    for names in cuts:
        optimizer = Langevin([{"params": [parameters[name]]} for name in names], lr=0.1)
        taken = SeededUpdates(optimizer, {parameters[name]: name for name in names}, noise)
        for step in range(2):
            for name in names:
                parameters[name].grad = torch.ones(3)
            taken.step(step)
        assert [(len(group["params"]), group["updates"]) for group in optimizer.param_groups] == [(1, 2)] * len(names)
    return parameters


def test_each_parameter_gets_the_same_noise_whatever_is_updated_beside_it() -> None:
    together, apart = updated([["a", "b", "c"]]), updated([["a"], ["c", "b"]])
    assert all(torch.equal(together[name], apart[name]) for name in "abc")
    assert not torch.equal(together["a"], together["b"])
