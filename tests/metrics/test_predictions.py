"""Tests the predictions of an evaluation: collected over workers and replicas, counted and drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gpipe_cli.distributed.world import World
from gpipe_cli.metrics.pictures import draw_images
from gpipe_cli.metrics.predictions import IMAGES, PredictionKeeper, Predictions
from gpipe_cli.tasks.classification import ClassificationTask


def keeper(rank: int = 0, others: tuple[Any, ...] = (), names: tuple[str, ...] = ()) -> PredictionKeeper:
    """Makes the keeper of one rank; ``others``: what the other ranks contribute."""
    world = SimpleNamespace(rank=rank, gather=lambda mine: [] if rank else [mine, *others])
    return PredictionKeeper(cast(World, world), ClassificationTask(), SimpleNamespace(class_names=names))


def numbered_images(first: int, count: int) -> Tensor:
    """Returns images whose every pixel is their number."""
    return torch.arange(first, first + count, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 4)


def logits(classes: list[int], confidence: float) -> Tensor:
    """Returns the logits of three classes."""
    rows = torch.full((len(classes), 3), (1 - confidence) / 2)
    rows[torch.arange(len(classes)), torch.tensor(classes)] = confidence
    return rows.log()


def test_an_image_is_shown_with_its_own_prediction() -> None:
    one = keeper(names=("a", "b", "c"))
    labels = torch.arange(100) % 3
    for first in range(0, 100, 10):
        mine = labels[first : first + 10]
        one.read([((numbered_images(first, 10),), (mine,))])
        one.judged((logits(mine.tolist(), 0.5 + first / 1000),), (mine,))
    found = one.finish()
    assert found is not None and len(found.images) == IMAGES
    assert [int(image[0, 0, 0]) for _, image in found.images] == [place for place, _ in found.images]
    assert [row[:2] for row in found.rows] == [(label, label) for label in labels.tolist()]
    assert [row[2] for row in found.rows] == pytest.approx([0.5 + place // 10 / 100 for place in range(100)])


def test_predictions_of_other_replicas_come_after_those_of_the_first() -> None:
    one = keeper(others=([[0, 1, 0.9], [1, 1, 0.8]], [], [[2, 2, 0.7]]))
    one.read([((numbered_images(0, 2),), (torch.tensor([0, 1]),))])
    found = one.finish()
    assert found is not None and [place for place, _ in found.images] == [0, 1]
    assert found.rows == [(0, 1, 0.9), (1, 1, 0.8), (2, 2, 0.7)]


def test_the_most_frequent_mistakes_are_named() -> None:
    rows = [(0, 1, 0.5), (0, 1, 0.5), (0, 0, 0.5), (1, 0, 0.5)]
    assert Predictions(rows, ["cat", "dog"], []).mistakes() == [
        {"class": "cat", "taken for": "dog", "times": 2, "of": 3},
        {"class": "dog", "taken for": "cat", "times": 1, "of": 1},
    ]


@pytest.mark.parametrize("images", [torch.rand(11, 3, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.uint8)])
def test_predictions_are_drawn_for_bytes_and_numbers_grey_and_coloured(images: torch.Tensor) -> None:
    rows = [(number % 2, 0.0, 0.5) for number in range(len(images))]
    drawn = str(draw_images(Predictions(rows, ["cat", "dog"], list(enumerate(images)))))
    assert drawn.count("<image ") == len(images) and "cat 50%" in drawn
    assert drawn.count("is dog") == len(images) // 2
