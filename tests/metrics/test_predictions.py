"""Tests the predictions of an evaluation: collected over workers and replicas, counted and drawn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from gpipe_cli.distributed.world import World
from gpipe_cli.metrics.image_pictures import draw_confusion, draw_predictions
from gpipe_cli.metrics.predictions import PredictionKeeper, Predictions
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
    assert found is not None and found.images is not None
    assert found.images[:, 0, 0, 0].tolist() == list(found.shown)
    assert np.array_equal(found.predicted, labels.numpy()) and np.array_equal(found.labels, labels.numpy())
    assert found.confidences == pytest.approx([0.5 + place // 10 / 100 for place in found.shown])


def test_predictions_of_other_replicas_come_after_those_of_the_first() -> None:
    of_last_worker = np.array([[0, 1, 0.9], [1, 1, 0.8]], np.float32)
    of_replica_1 = np.array([[2, 2, 0.7]], np.float32)
    one = keeper(others=(of_last_worker, None, of_replica_1))
    one.read([((numbered_images(0, 2),), (torch.tensor([0, 1]),))])
    found = one.finish()
    assert found is not None
    assert (found.labels.tolist(), found.predicted.tolist()) == ([0, 1, 2], [1, 1, 2])
    assert found.confidences == pytest.approx([0.9, 0.8])


def predicted(labels: list[int], predicted: list[int], names: list[str]) -> Predictions:
    shown = range(len(labels))
    return Predictions(np.array(labels), np.array(predicted), names, None, shown, [0.5] * len(labels))


@pytest.mark.parametrize("classes", [3, 25, 1000])
def test_the_confusion_matrix_is_drawn_for_few_and_many_classes(classes: int, tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(classes)]
    draw_confusion(predicted([0, 1, 2], [0, 1, 1], names), tmp_path / "c.png")
    assert min(Image.open(tmp_path / "c.png").size) > 300


@pytest.mark.parametrize("images", [torch.rand(11, 3, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.uint8)])
def test_predictions_are_drawn_for_bytes_and_numbers_grey_and_coloured(images: torch.Tensor, tmp_path: Path) -> None:
    found = predicted([number % 2 for number in range(len(images))], [0] * len(images), ["cat", "dog"])
    draw_predictions(found, images, tmp_path / "p.png")
    assert Image.open(tmp_path / "p.png").format == "PNG"
