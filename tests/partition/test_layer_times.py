"""Tests times of forward, backward and the loss, by layers that sleep for a known time."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.partition import layer_times
from gpipe_cli.partition.fake_layers import CostError
from gpipe_cli.partition.layer_times import LayerTimes, LayerTrial, total_times
from gpipe_cli.partition.profile import ModelProfile, profile_layers
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm

CPU = torch.device("cpu")
FORWARD, BACKWARD = 0.004, 0.008  # seconds


class SleepsGoingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(BACKWARD)
        return gradients[0]


class Sleeping(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = SleepsGoingBack.apply(super().forward(input))
        return made


def sleeping_loss(outputs: tuple[Tensor, ...]) -> Tensor:
    made: Tensor = SleepsGoingBack.apply(outputs[0].sum())
    return made


def profile(*makers: Any, **options: Any) -> ModelProfile:
    builders = [LayerBuilder(f"layer_{number}", make) for number, make in enumerate(makers)]
    return profile_layers(builders, (torch.zeros(4, 8),), CPU, **options)


def test_forward_and_backward_of_every_layer_are_timed() -> None:
    found = profile(partial(Sleeping, 8, 8), partial(nn.Linear, 8, 8))
    slow = found.times[0]
    assert min(slow.inference, slow.forward, slow.recompute) >= FORWARD
    assert slow.backward >= BACKWARD
    assert [layer.cost for layer in found.layers] == [times.total for times in found.times]
    assert slow.total == slow.forward + slow.backward


def test_halves_of_a_backward_are_timed_apart() -> None:
    """The layer sleeps on the gradient's way to the input; where nobody waits for that, the first half does it all."""
    first, second = profile(*[partial(Sleeping, 8, 8)] * 2).times
    assert second.input_gradient >= BACKWARD
    assert 0 < second.weight_gradient < BACKWARD
    assert first.input_gradient >= BACKWARD
    assert first.weight_gradient < BACKWARD / 10


def test_the_loss_stands_behind_the_last_layer_which_pays_for_it() -> None:
    found = profile(partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 4), loss=sleeping_loss)
    assert found.loss is not None
    assert found.loss.forward >= FORWARD
    assert found.loss.backward >= BACKWARD
    assert [layer.cost for layer in found.costs] == [found.times[0].total, found.times[1].total + found.loss.total]
    without = profile(partial(nn.Linear, 8, 8))
    assert without.loss is None
    assert without.costs == without.layers


def test_a_loss_that_fails_is_named() -> None:
    with pytest.raises(CostError, match=r"the task's loss fails while it is timed: IndexError"):
        profile(partial(nn.Linear, 8, 8), loss=lambda outputs: outputs[1])


class Judged(nn.Linear):
    """Has an auxiliary loss, as AmoebaNet's cell with an auxiliary head."""

    def auxiliary_loss(self, outputs: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        return sleeping_loss((outputs - targets[0],))


def test_an_auxiliary_loss_belongs_to_its_layer() -> None:
    judged, other = profile(partial(Judged, 8, 8), partial(nn.Linear, 8, 8), targets=(torch.zeros(4, 8),)).times
    assert min(judged.inference, judged.forward, judged.recompute) >= FORWARD
    assert judged.backward >= BACKWARD
    assert max(other.forward, other.backward) < FORWARD
    assert profile(partial(Judged, 8, 8)).times[0].forward < FORWARD  # without targets there is nothing to judge by


def test_an_auxiliary_loss_that_fails_is_named_with_its_layer() -> None:
    with pytest.raises(CostError, match=r"layer 'layer_0'.*IndexError"):
        profile(partial(Judged, 8, 8), targets=())


def test_layers_that_are_equal_are_timed_once() -> None:
    first, second, third = profile(*[partial(Sleeping, 8, 8)] * 3).times
    assert second is third  # the first differs: its input needs no gradient
    assert first is not second


def test_small_groups_give_every_layer_its_times_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "_ENOUGH", 1)
    found = profile(partial(Sleeping, 8, 8), partial(nn.Linear, 8, 4), partial(nn.Linear, 4, 4), loss=sleeping_loss)
    assert all(times.total > 0 for times in found.times)
    assert found.loss is not None


def test_a_layer_may_work_in_place() -> None:
    assert all(times.total > 0 for times in profile(partial(nn.Linear, 8, 8), partial(nn.ReLU, inplace=True)).times)


def test_batchnorm_gathers_in_every_forward_but_not_when_it_is_recomputed() -> None:
    module = nn.Sequential(nn.BatchNorm1d(8))
    trial = LayerTrial.of(module, (torch.zeros(4, 8),), CPU)
    batchnorm = module[0]
    assert isinstance(batchnorm, DeferredBatchNorm)
    trial.forward()
    trial.infer()
    trial.recompute()
    assert batchnorm.gathered_count == 2 * 4


class Stream:
    """Stands for a GPU's, where work takes as long as a test says, and waiting for it half a second."""

    now, waits = 0.0, 0

    def work(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, *_: object) -> None:
        self.waits += 1
        self.now += 0.5


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, -1.0

    def record(self, stream: Stream) -> None:
        self.at = stream.now

    def synchronize(self) -> None:
        self.stream.wait()

    def elapsed_time(self, end: StreamEvent) -> float:
        return (end.at - self.at) * 1000


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: StreamEvent(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    monkeypatch.setattr(torch.cuda, "synchronize", made.wait)
    return made


def test_a_gpu_is_not_waited_for_around_what_is_timed(stream: Stream) -> None:
    clock = layer_times._Clock(torch.device("cuda"))
    for seconds in (0.1, 0.3, 0.2):
        with clock.running("forward"):
            stream.work(seconds)
    assert stream.waits == 0
    assert clock.median("forward") == pytest.approx(0.2)
    assert stream.waits > 0  # else the events may not have come yet


def test_what_a_gpu_did_before_it_was_warm_does_not_count(stream: Stream) -> None:
    clock = layer_times._Clock(torch.device("cuda"))
    for seconds in (9.0, 0.2):
        clock.forget()
        with clock.running("forward"):
            stream.work(seconds)
    assert clock.median("forward") == pytest.approx(0.2)


def test_times_of_layers_add_up() -> None:
    ones, tens = LayerTimes(1, 2, 3, 4, 5, 6), LayerTimes(10, 20, 30, 40, 50, 60)
    assert total_times([ones, tens]) == LayerTimes(11, 22, 33, 44, 55, 66)
