"""Collects the predictions of a classification during an evaluation, and some examples to look at.

Images are only on the first worker of a replica, outputs only on the last. So the last workers keep label, prediction
and confidence of each example, rank 0 keeps some of the images that it reads anyway, and all are gathered once, at the
end of the evaluation. Other tasks have no extra cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..data.sampling import EvenSample
from ..data.source import Source
from ..distributed.world import World
from ..micro_batch import MicroBatch
from ..tasks.base import Task

IMAGES = 24  # in the picture; enough to judge, few enough to draw in half a second


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
        source: names the classes; on the first worker of each replica, None elsewhere.
    """

    def __init__(self, world: World, task: Task, source: Source | None) -> None:
        self._world, self._task, self._source = world, task, source
        self._rows: list[Tensor] = []
        self._images = EvenSample[Tensor](IMAGES)

    def read(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Keeps some images of a mini-batch that this worker has read; tensors that are no images are ignored."""
        for images in (inputs[0] for inputs, _ in micro_batches):
            if self._world.rank == 0 and images.dim() == 4 and images.shape[1] in (1, 3):
                for place in self._images.places(len(images)):
                    self._images.keep(place, images[place].clone())  # a view would keep the whole micro-batch
                self._images.go_on(len(images))

    def judged(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
        """Keeps the predictions of a micro-batch at the last cell; called in the order of reading."""
        self._rows.append(self._task.predictions(outputs, targets).float().cpu())

    def finish(self) -> Predictions | None:
        """Gathers the predictions of all workers on rank 0 and resets; returns None elsewhere and without data."""
        mine = torch.cat(self._rows).tolist() if self._rows else None
        kept, self._rows, self._images = self._images.kept, [], EvenSample(IMAGES)
        seen = [np.array(rows, dtype=np.float32) for rows in self._world.gather(mine) if rows is not None]
        if not seen:
            return None
        rows = np.concatenate(seen)
        labels, predicted = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
        known = () if self._source is None else self._source.class_names
        classes = max(len(known), int(max(labels.max(), predicted.max())) + 1)
        names = [*known, *(str(number) for number in range(len(known), classes))]
        count = min(IMAGES, len(kept))
        shown, images = zip(*(kept[i * len(kept) // count] for i in range(count)), strict=True) if kept else ((), ())
        stacked = torch.stack(images) if len({image.shape for image in images}) == 1 else None
        return Predictions(labels, predicted, names, stacked, shown, [float(rows[place, 2]) for place in shown])
