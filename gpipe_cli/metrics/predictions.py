"""Collects the predictions of a classification during an evaluation, and some examples to look at.

Images are only on the first worker of a replica, outputs only on the last. So the last workers keep label, prediction
and confidence of each example, rank 0 keeps some of the images that it reads anyway, and all are gathered once, at the
end of the evaluation. Other tasks have no extra cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..data.sampling import EvenSample
from ..data.source import Source
from ..distributed.world import World
from ..micro_batch import MicroBatch
from ..tasks.base import Task

IMAGES = 24  # in the picture, which is drawn while all workers wait
MISTAKES = 10  # most frequent ones, by name


@dataclass(frozen=True)
class Predictions:
    """Holds all predictions of one evaluation.

    Attributes:
        rows: label, predicted class and its probability of every example; those of replica 0 come first.
        names: by class number.
        images: some examples, each with its place in `rows`: [3 or 1, H, W], all alike; none if the data are no images.
    """

    rows: Sequence[tuple[float, float, float]]
    names: Sequence[str]
    images: Sequence[tuple[int, Tensor]]

    def mistakes(self) -> list[dict[str, Any]]:
        """Returns the most frequent mistakes: true class, predicted class, how often, of how many examples."""
        wrong = Counter((int(label), int(predicted)) for label, predicted, _ in self.rows if label != predicted)
        examples = Counter(int(label) for label, _, _ in self.rows)
        return [
            {"class": self.names[label], "taken for": self.names[predicted], "times": times, "of": examples[label]}
            for (label, predicted), times in wrong.most_common(MISTAKES)
        ]


class PredictionKeeper:
    """Collects the predictions of one evaluation after another; every worker calls `finish` at the same time.

    Args:
        task: whose `predictions` are kept.
        source: names the classes; on the first worker of each replica, None elsewhere.
    """

    def __init__(self, world: World, task: Task, source: Source | None) -> None:
        self._world, self._task, self._source = world, task, source
        self._rows: list[list[float]] = []
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
        self._rows += self._task.predictions(outputs, targets).tolist()

    def finish(self) -> Predictions | None:
        """Gathers the predictions of all workers on rank 0 and resets; returns None elsewhere and without data."""
        rows = [(*row,) for rows in self._world.gather(self._rows) for row in rows]
        kept, self._rows, self._images = self._images.kept, [], EvenSample(IMAGES)
        if not rows:
            return None
        known = () if self._source is None else self._source.class_names
        classes = int(max(max(label, predicted) for label, predicted, _ in rows)) + 1
        names = [*known, *(str(number) for number in range(len(known), classes))]
        alike = len({image.shape for _, image in kept}) == 1
        count = min(IMAGES, len(kept))
        return Predictions(rows, names, [kept[i * len(kept) // count] for i in range(count)] if alike else ())
