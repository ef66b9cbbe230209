"""Draws pictures of a classification: sample predictions and the confusion matrix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .figure import new_figure

if TYPE_CHECKING:
    from .predictions import Predictions

RIGHT, WRONG = "#2a7f3f", "#c0392b"
MOST_COLUMNS = 8  # of sample images
MOST_NAMED_CLASSES = 30  # more names along an axis are unreadable
MOST_PRINTED_CLASSES = 15  # likewise numbers in the squares
LONGEST_NAME = 18


def draw_classification(found: Predictions, folder: Path) -> list[Path]:
    """Draws confusion.png and, if the data are images, predictions.png of an evaluation; returns their paths."""
    paths = []
    if found.images is not None:
        paths.append(folder / "predictions.png")
        draw_predictions(found, found.images, paths[-1])
    paths.append(folder / "confusion.png")
    draw_confusion(found, paths[-1])
    return paths


def draw_predictions(found: Predictions, images: Tensor, path: Path) -> None:
    """Draws a grid of images, each with its predicted class and, if that is wrong, with the true class.

    Args:
        images: those of `found`: uint8, or floating point in any range, [n, 3 or 1, H, W].
        path: of the PNG file.
    """
    columns = min(MOST_COLUMNS, len(images))
    rows = -(-len(images) // columns)
    shown = list(found.shown)
    labels, predicted = found.labels[shown], found.predicted[shown]
    figure = new_figure(1.35 * columns + 0.3, 1.75 * rows + 0.5)
    figure.suptitle(f"{np.sum(labels == predicted)} of these {len(images)} right", fontsize=11)
    pixels = _pixels(images)
    for number, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.set_axis_off()
        if number < len(images):
            axes.imshow(pixels[number], interpolation="nearest")
            right = labels[number] == predicted[number]
            caption = f"{_short(found.class_names[predicted[number]])} {found.confidences[number]:.0%}"
            if not right:
                caption += f"\nis {_short(found.class_names[labels[number]])}"
            axes.set_title(caption, fontsize=8, color=RIGHT if right else WRONG)
    figure.savefig(path, dpi=130)


def draw_confusion(found: Predictions, path: Path) -> None:
    """Draws the confusion matrix: a row for each true class, a square's colour is the share predicted so.

    With at most 15 classes the squares show counts; with more than 30 the axes show numbers instead of names.

    Args:
        path: of the PNG file.
    """
    names = [_short(name) for name in found.class_names]
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (found.labels, found.predicted), 1)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = min(9.0, 3.5 + 0.35 * len(names))
    figure = new_figure(side + 1, side)
    axes = figure.add_subplot()
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(picture, ax=axes, fraction=0.046, label="share of the true class")
    axes.set_title(f"accuracy {np.trace(counts) / max(1, counts.sum()):.4g}, {counts.sum():,} examples", fontsize=11)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if len(names) <= MOST_NAMED_CLASSES:
        upright = max(map(len, names)) <= 2
        axes.set_xticks(range(len(names)), names, rotation=0 if upright else 90, fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
    if len(names) <= MOST_PRINTED_CLASSES:
        for true, predicted in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[true, predicted] > 0.5 else "#444444"
            axes.text(predicted, true, str(counts[true, predicted]), ha="center", va="center", fontsize=8, color=colour)
    figure.savefig(path, dpi=130)


def _pixels(images: Tensor) -> npt.NDArray[np.uint8]:
    """Returns uint8 [n, H, W, 3]; floating-point images are scaled to the full range, all by the same factor."""
    if images.is_floating_point():
        images = images.float()
        low, high = images.min(), images.max()
        images = (255 * (images - low) / (high - low).clamp(min=1e-12)).round()
    array: npt.NDArray[np.uint8] = images.cpu().to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    return array


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
