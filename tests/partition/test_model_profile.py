"""Tests the times of forward, backward, its halves and the loss, with layers that turn the clock themselves."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.partition import model_profile
from gpipe_cli.partition.model_profile import ModelProfile, profile_layers
from gpipe_cli.pipeline.halves import WeightHalf

CPU = torch.device("cpu")
FORWARD, BACKWARD, WEIGHT = 4.0, 8.0, 2.0  # seconds
CLOCK = SimpleNamespace(now=0.0, waited=0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_profile, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now))
    monkeypatch.setattr(model_profile, "waited_for_core", lambda: CLOCK.waited)


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


class SlowInput(nn.Linear):
    """Takes its time for the gradient of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(Takes.apply(input, 0, BACKWARD))


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


def test_time_in_which_other_processes_had_the_core_does_not_count() -> None:
    class Preempted(Slow):
        def forward(self, input: Tensor) -> Tensor:
            CLOCK.now, CLOCK.waited = CLOCK.now + 3, CLOCK.waited + 3
            return super().forward(input)

    assert profile(partial(Preempted, 8, 8)).layers[0].forward == pytest.approx(FORWARD)


def test_halves_of_a_backward_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has no gradient to hand back: nothing is left for its second half."""
    run = WeightHalf.run

    def slowly(half: WeightHalf) -> None:
        CLOCK.now += WEIGHT * bool(half._joints)
        run(half)

    monkeypatch.setattr(WeightHalf, "run", slowly)
    first, second = profile(*[partial(SlowInput, 8, 8)] * 2).layers
    assert (second.input_gradient, second.weight_gradient, second.backward) == (BACKWARD, WEIGHT, BACKWARD)
    assert (first.input_gradient, first.weight_gradient, first.backward) == (0, 0, 0)


def test_the_loss_stands_behind_the_last_layer_which_pays_for_it() -> None:
    found = profile(partial(Slow, 8, 8), partial(nn.Linear, 8, 4), loss=slow_loss)
    assert found.loss is not None
    assert (found.loss.forward, found.loss.backward) == (FORWARD, BACKWARD)
    assert [times.total for times in found.with_loss] == [FORWARD + BACKWARD, FORWARD + BACKWARD]
