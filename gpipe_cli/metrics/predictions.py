"""Collects the predictions of a classification during an evaluation, and some examples to look at.

Images are only on the first worker of a replica, outputs only on the last. So the last workers keep label, prediction
and confidence of each example, rank 0 keeps some of the images that it reads anyway, and all are gathered once, at the
end of the evaluation. Other tasks have no extra cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..distributed.world import World
from ..micro_batch import MicroBatch

IMAGES = 24  # in the picture; enough to judge, few enough to draw in half a second


class PredictingTask(Protocol):
    """Describes a task whose predictions can be shown; the method is optional for tasks."""

    def predictions(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor: ...


@dataclass(frozen=True)
class Predictions:
    """Holds all predictions of one evaluation.

    Attributes:
        labels, predicted: class numbers of every example, int64 [n]; those of replica 0 come first.
        class_names: by class number.
        images: some examples, [s, 3 or 1, H, W]; None if the data are no images.
        shown: index in `labels` of each of these examples.
        confidences: the model's probability of its prediction, for each of these examples.
    """

    labels: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    class_names: Sequence[str]
    images: Tensor | None
    shown: Sequence[int]
    confidences: Sequence[float]


class PredictionKeeper:
    """Collects the predictions of one evaluation after another; every worker calls `finish` at the same time.

    Args:
        task: whose `predictions` are kept.
        source: may have `class_names`; on the first worker of each replica, None elsewhere.
    """

    def __init__(self, world: World, task: PredictingTask, source: Any) -> None:
        self._world, self._task, self._source = world, task, source
        self._rows: list[Tensor] = []
        self._images = SpreadExamples(IMAGES)

    def read(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Keeps images of a mini-batch that this worker has read."""
        if self._world.rank == 0:
            for inputs, _ in micro_batches:
                self._images.add(inputs[0])

    def judged(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
        """Keeps the predictions of a micro-batch at the last cell; called in the order of reading."""
        self._rows.append(self._task.predictions(outputs, targets).float().cpu())

    def finish(self) -> Predictions | None:
        """Gathers the predictions of all workers on rank 0 and resets; returns None elsewhere and without data."""
        mine = torch.cat(self._rows).tolist() if self._rows else None
        images, self._rows, self._images = self._images, [], SpreadExamples(IMAGES)
        seen = [np.array(rows, dtype=np.float32) for rows in self._world.all_gather(mine) if rows is not None]
        if self._world.rank != 0 or not seen:
            return None
        rows = np.concatenate(seen)
        labels, predicted = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
        known = getattr(self._source, "class_names", ())
        classes = max(len(known), int(max(labels.max(), predicted.max())) + 1)
        names = [*known, *(str(number) for number in range(len(known), classes))]
        confidences = [float(rows[place, 2]) for place in images.places]
        return Predictions(labels, predicted, names, images.stacked(), images.places, confidences)


class SpreadExamples:
    """Keeps between ``wanted`` and twice as many examples of a stream of unknown length, evenly spread.

    Attributes:
        places: numbers of the examples that `stacked` returns, counted from 0.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted, self._stride, self._count = wanted, 1, 0
        self._kept: list[tuple[int, Tensor]] = []

    def add(self, images: Tensor) -> None:
        """Adds the next examples, [b, C, H, W]; ignores tensors that are no images."""
        if images.dim() != 4 or images.shape[1] not in (1, 3):
            return
        for offset in range(-self._count % self._stride, len(images), self._stride):
            self._kept.append((self._count + offset, images[offset].clone()))  # a view would keep the whole micro-batch
        self._count += len(images)
        while len(self._kept) > 2 * self._wanted:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    @property
    def places(self) -> list[int]:
        return [place for place, _ in self._chosen()]

    def stacked(self) -> Tensor | None:
        """Returns the chosen images, [s, C, H, W]; None if there are none or their sizes differ."""
        images = [image for _, image in self._chosen()]
        return torch.stack(images) if len({image.shape for image in images}) == 1 else None

    def _chosen(self) -> list[tuple[int, Tensor]]:
        wanted = min(self._wanted, len(self._kept))
        return [self._kept[i * len(self._kept) // wanted] for i in range(wanted)]
