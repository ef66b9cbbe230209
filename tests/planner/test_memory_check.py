"""Tests that a model of one's own that no memory here holds is refused before a worker builds it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import checked
from inline_run import train_inline
from own_model import DIGITS, Flatten
from torch import nn

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.planner.kept import refuse_too_large

MB = 1 << 20


def layers(count: int = 4, **options: Any) -> list[LayerBuilder]:
    """Returns layers of a MiB of weights each."""
    return [LayerBuilder(f"layer.{n}", partial(nn.Linear, 512, 512, bias=False, **options)) for n in range(count)]


def told(memory: float, *words: str, trains: bool = True, **options: Any) -> str:
    """Returns the refusal of four layers; empty where they fit."""
    try:
        refuse_too_large(layers(**options), checked("optimizer=adam", *words).settings, int(memory * MB), trains)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fits", "words", "options"),
    [
        (16, (), {}),  # weight, gradient, two moments
        (8, ("optimizer=sgd", "optimizer.momentum=0"), {}),
        (4, (), {"trains": False}),
        (32, ("pipeline.replicas=2", "pipeline.workers=1"), {}),
        (24, ("pipeline.replicas=2", "pipeline.workers=1", "pipeline.shard_optimizer=true"), {}),
        (8, (), {"dtype": torch.bfloat16}),
    ],
    ids=["adam", "sgd", "evaluation", "replicas", "divided state", "half"],
)
def test_weights_gradients_and_state_are_counted(fits: int, words: tuple[str, ...], options: dict[str, Any]) -> None:
    assert told(fits / 1.09, *words, **options) == ""
    assert "make the model smaller" in told(fits / 1.11, *words, **options)


def huge(side: int) -> list[LayerBuilder]:
    """Returns three layers, of which the middle has side² weights."""
    sizes = [LayerBuilder("wide", partial(nn.Linear, 192, side)), LayerBuilder("huge", partial(nn.Linear, side, side))]
    return [LayerBuilder("flatten", Flatten), *sizes, LayerBuilder("last", partial(nn.Linear, side, 10))]


def test_a_run_is_refused_by_the_name_of_the_layer(tmp_path: Path) -> None:
    own = ["model._target_=test_memory_check.huge", "++model.side=3000000"]
    with pytest.raises(ConfigurationError, match=r"parameters, whose weights.* .*, with 144,000\.0 GB"):
        train_inline(tmp_path, *DIGITS, *own, "pipeline.K=2", "trainer.steps=1")
