"""Tests every learning-rate schedule against numbers worked out by hand, and that a wrong key is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpipe_cli.optim import lr_schedules


def rates(make: Any, updates: int, lr: float = 1.0, **keys: Any) -> list[float]:
    """Returns the learning rates of the first updates."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = make(optimizer, **keys)
    used = []
    for _ in range(updates):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


def test_inverse_sqrt_peaks_at_the_end_of_its_warm_up() -> None:
    expected = [0.5, 1.0, 1.5, 2.0, 2.0 * (4 / 5) ** 0.5, 2.0 * (4 / 6) ** 0.5]
    assert rates(lr_schedules.inverse_sqrt, 6, lr=2.0, warmup_steps=4) == pytest.approx(expected)


def test_the_transformer_schedule_is_the_recipe_s_formula() -> None:
    expected = [3 * 0.25 * min((t + 1) ** -0.5, (t + 1) / 8) for t in range(6)]
    assert rates(lr_schedules.transformer, 6, d_model=16, factor=3.0, warmup_steps=4) == pytest.approx(expected)


def test_cosine_rises_falls_and_stays_at_its_end() -> None:
    expected = [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]  # 2 steps up, half a cosine over 2, then `final`
    assert rates(lr_schedules.cosine, 6, steps=4, warmup_steps=2, final=0.5) == pytest.approx(expected)


def test_a_cosine_shorter_than_its_warm_up_rises_for_half_of_its_steps() -> None:
    assert rates(lr_schedules.cosine, 4, steps=4, warmup_steps=50) == pytest.approx([0.5, 1.0, 1.0, 0.5])


def test_constant_is_constant_after_its_warm_up() -> None:
    assert rates(lr_schedules.constant, 4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(lr_schedules.constant, 2) == [1.0, 1.0]


def test_exponential_falls_in_stairs_that_count_from_the_first_step_down_to_its_floor() -> None:
    stairs = {"rate": 0.5, "decay_every": 2.5, "warmup_steps": 2, "floor": 0.2}  # stairs end after steps 2.5, 5, 7.5
    assert rates(lr_schedules.exponential, 9, **stairs) == [0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2]


def test_exponential_in_epochs_has_the_same_stairs() -> None:
    epochs = {"rate": 0.5, "decay_epochs": 2.0, "warmup_epochs": 1.6, "floor": 0.0, "examples": 10, "batch_size": 8}
    assert rates(lr_schedules.exponential_epochs, 6, **epochs) == [0.5, 1.0, 1.0, 0.5, 0.5, 0.25]  # 1.25 steps each
