"""Tests that an exception in a backward names cell, layers and micro-batch."""

from __future__ import annotations

import pytest
from in_backward import in_backward
from small_models import build_all, engine_of, mini_batch, small_model, token_loss, train_step
from torch import Tensor, nn

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.pipeline.cell import LayerFailed


def broken(gradient: Tensor) -> None:
    raise ValueError("broken")


class Broken(nn.Module):
    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return in_backward(inputs[0], broken), *inputs[1:]


@pytest.mark.parametrize(
    ("kind", "sizes", "place"),
    [
        ("1f1b", [2, 1, 4], "cell 1, backward of layer 'broken', micro-batch 0"),
        ("zero_bubble", [7], "cell 0, backward of layers 'embed' to 'head', micro-batch 0"),
    ],
)
def test_a_failing_backward_names_the_layers_of_its_cell(kind: str, sizes: list[int], place: str) -> None:
    builders = small_model()
    builders[2] = LayerBuilder("broken", Broken)
    with pytest.raises(LayerFailed, match=place) as failed:
        train_step(engine_of(build_all(builders), sizes), kind, "never", mini_batch(0, 8, 3))
    assert str(failed.value.__cause__) == "broken"


def test_a_failing_backward_of_the_loss_names_the_last_cell() -> None:
    def loss(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        value, statistics = token_loss(outputs, targets)
        return in_backward(value, broken), statistics

    engine = engine_of(build_all(small_model()), [3, 4])
    engine.loss = loss
    with pytest.raises(LayerFailed, match=r"cell 1, backward of layers .*, micro-batch 2"):
        train_step(engine, "gpipe", "never", mini_batch(0, 8, 3))
