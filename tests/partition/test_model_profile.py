"""Tests the times of forward, backward, its halves and the loss, with layers that turn the clock themselves."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.partition import model_profile
from gpipe_cli.partition.cost import with_loss
from gpipe_cli.partition.model_profile import ModelProfile, profile_layers

CPU = torch.device("cpu")
FORWARD, BACKWARD = 4.0, 8.0  # seconds
CLOCK = SimpleNamespace(now=0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = dict.fromkeys(("perf_counter", "thread_time"), lambda: CLOCK.now)
    monkeypatch.setattr(model_profile, "time", SimpleNamespace(**clocks))


class Takes(torch.autograd.Function):
    """Returns its input after so many seconds, and its gradient after so many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        CLOCK.now += forward
        ctx.backward_seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        CLOCK.now += ctx.backward_seconds
        return gradients[0], None, None


class Slow(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = Takes.apply(super().forward(input), FORWARD, BACKWARD)
        return made


def slow_loss(outputs: tuple[Tensor, ...]) -> Tensor:
    made: Tensor = Takes.apply(outputs[0].sum(), FORWARD, BACKWARD)
    return made


def profile(*makers: Any, **options: Any) -> ModelProfile:
    builders = [LayerBuilder(f"layer_{number}", make) for number, make in enumerate(makers)]
    return profile_layers(builders, (torch.zeros(4, 8),), CPU, **options)


def test_forward_and_backward_of_every_layer_are_timed() -> None:
    found = profile(partial(Slow, 8, 8), partial(nn.Linear, 8, 8))
    slow = found.layers[0]
    assert (slow.inference, slow.forward, slow.recompute, slow.backward) == (FORWARD, FORWARD, FORWARD, BACKWARD)
    assert [times.total for times in found.layers] == [FORWARD + BACKWARD, 0]


def test_the_loss_stands_behind_the_last_layer_which_pays_for_it() -> None:
    found = profile(partial(Slow, 8, 8), partial(nn.Linear, 8, 4), loss=slow_loss)
    assert found.loss is not None
    assert (found.loss.forward, found.loss.backward) == (FORWARD, BACKWARD)
    both = with_loss(found.layers, found.loss)
    assert [times.total for times in both] == [FORWARD + BACKWARD, FORWARD + BACKWARD]
