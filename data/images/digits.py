"""Yields mini-batches of 1,797 real handwritten digits inside the package (digits.NOTICE), with nothing to download.

They show that a model learns; they are no benchmark, because 360 test images cannot separate two good models.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ...micro_batch import MicroBatch
from ...typed_section import Part, Pixels
from ..source import Batch, Report, permutation, read_ahead, slices_of_replica
from ..torch_datasets import Key
from .source import SquareImages

DIGITS: Literal[10] = 10
TRAINING_IMAGES, TEST_IMAGES = 1437, 360  # these are mostly of writers who are not in the training set
WHITE = 16  # the brightest value of the stored images


class DigitsSource(SquareImages):
    """Yields mini-batches of digits, enlarged, and in training slightly rotated, moved and scaled.

    A micro-batch is `((images uint8 [b, 3, S, S],), (labels int64 [b],))`. All images are kept in memory, enlarged;
    order and augmentation depend on (seed, epoch, index) alone.

    Args:
        batch_size: images of a mini-batch, over all micro-batches and replicas.
        classes: 10; models read it from the configuration.
        image_size: side S that the 8×8 pixels are enlarged to (bilinear).
        rotate: largest rotation in degrees, either way.
        shift: largest shift, as a share of the side, in each direction.
        scale: largest change of size; 0.1 means 0.9 to 1.1 times.
        seed: decides order and augmentation.
    """

    def __init__(
        self,
        batch_size: Annotated[int, Field(ge=1, le=1437)] = 64,
        classes: Literal[10] = DIGITS,
        image_size: Pixels = 32,
        rotate: Annotated[float, Field(ge=0, le=180)] = 10.0,
        shift: Part = 0.06,
        scale: Annotated[float, Field(ge=0, le=0.9)] = 0.1,
        seed: int = 0,
    ) -> None:
        train, test = (cast(Any, range(images)) for images in (TRAINING_IMAGES, TEST_IMAGES))
        super().__init__(train, test, batch_size, seed=seed)
        self.class_names = [str(digit) for digit in range(DIGITS)]
        self._image_size = image_size
        self._affine = (float(np.deg2rad(rotate)), scale, 2 * shift, 2 * shift)  # grids reach from −1 to 1

    def prepare(self, report: Report) -> None:
        """Reads and enlarges all images, in a few hundredths of a second."""
        with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
            images, labels = torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"])
        bright = images[:, None] * (255 / WHITE)
        self._images = F.interpolate(bright, self._image_size, mode="bilinear", align_corners=False)
        self._labels = labels.to(torch.int64)

    def first_images(self, count: int) -> Tensor:
        """Returns the first images of the first epoch as they are trained on, uint8 [n, 3, S, S]."""
        return next(self._train(0, 0, [slice(0, count)])).micro_batches[0][0][0]

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields mini-batches without end; a position is `{"epoch": e, "batch": b}`, the next one to make."""
        start = position or {"epoch": 0, "batch": 0}
        slices = slices_of_replica(self._batch_size, M, replica, replicas, "data.batch_size")
        return read_ahead(self._train(start["epoch"], start["batch"], slices))

    def read(self, examples: Any, keys: Sequence[Key]) -> MicroBatch:
        """Returns the test images with these indices, unchanged."""
        numbers = [TRAINING_IMAGES + index for _, index in keys]
        return _micro_batch(self._images[numbers], self._labels[numbers])

    def _train(self, epoch: int, batch: int, slices: list[slice]) -> Iterator[Batch]:
        """Yields these slices of each mini-batch without end, from mini-batch `batch` of `epoch` on."""
        for current in count(epoch):
            order = permutation(TRAINING_IMAGES, self._seed, current)
            matrices = self._matrices(current)
            for place in range(batch, self._batches):
                numbers = order[place * self._batch_size : (place + 1) * self._batch_size]
                # The whole mini-batch at once, so that its division into micro-batches changes no rounding.
                plain = self._images[numbers]
                grid = F.affine_grid(matrices[numbers], list(plain.shape), align_corners=False)
                images = F.grid_sample(plain, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
                following = {"epoch": current + (place + 1) // self._batches, "batch": (place + 1) % self._batches}
                labels = self._labels[numbers]
                yield Batch([_micro_batch(images[part], labels[part]) for part in slices], following)
            batch = 0

    def _matrices(self, epoch: int) -> Tensor:
        """Returns the inverse affine maps [n, 2, 3] of the training images in an epoch."""
        words = np.random.Philox(np.random.SeedSequence((self._seed, epoch))).random_raw(4 * TRAINING_IMAGES)
        uniform = (words >> np.uint64(11)).astype(np.float64).reshape(-1, 4) * 2.0**-52 - 1
        angle, size, across, down = (uniform * np.array(self._affine)).T
        cos, sin = np.cos(angle) / (1 + size), np.sin(angle) / (1 + size)
        return torch.from_numpy(np.stack([cos, -sin, across, sin, cos, down], axis=1).reshape(-1, 2, 3)).float()


def _micro_batch(images: Tensor, labels: Tensor) -> MicroBatch:
    return (images.round().to(torch.uint8).repeat(1, 3, 1, 1),), (labels,)
