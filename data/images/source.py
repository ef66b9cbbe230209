"""Yields mini-batches of images from files: ImageNet, the paper's transfer data sets (section 4), or a user's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ...cpu import usable_cores
from ...errors import ConfigurationError, in_utf8
from ...micro_batch import MicroBatch, Tensors
from ...typed_section import Count, CountOrZero, Examples, Part, PartAboveZero, Pixels
from ..source import Batch, Report, Source, read_ahead, split_evenly
from ..torch_datasets import DatasetSource
from .datasets import Name, open_images
from .files import BrokenImageError, Images
from .transforms import Transform, evaluation_transform, training_transform

log = logging.getLogger(__name__)

MOST_WORKERS = 16  # chosen by "auto": more would only fill the memory with mini-batches

Example = tuple[Tensor | None, int, list[BrokenImageError]]
"""One transformed image, uint8 [3, S, S], or None if none could be read; its label; the broken images tried."""

Loaded = tuple[Tensors, Tensors, list[BrokenImageError]]
"""What a loader process returns: a micro-batch, and the broken images tried."""


class ImageSource(Source):
    """Yields mini-batches of images that loader processes read and transform.

    A micro-batch is `((images uint8 [b, 3, S, S],), (labels int64 [b],))`: bytes, which the model's first layer scales
    on its device. Order and augmentation depend on (seed, epoch, index) alone, not on where a run resumes or on the
    number of loader processes.

    A training image that cannot be decoded is replaced by the next good one of the data set, an evaluation image is
    left out. Each is logged and listed in `broken_images`; more than `broken_images_limit` of them end the run.

    Args:
        dataset: see `datasets.open_images`.
        classes: number of classes; checked.
        root: the folder that holds the data set.
        download: fetch the data set if it is not there.
        folders: the training and the evaluation folder of an image folder.
        images: expected numbers of training and evaluation images, to notice half-unpacked folders; None: any.
        image_size: side S in pixels.
        batch_size: images of a mini-batch, over all micro-batches and replicas.
        drop_last: leave out an epoch's last images if they do not fill a mini-batch.
        crop_area, flip, brightness, chroma, cutout: see `transforms.training_transform`.
        bits: that images of 16 bits use, as 12; None: as the file says, else 16.
        evaluation_crop: share of height and width that evaluation keeps.
        workers: loader processes of a replica; "auto": as many as its share of the machine's cores, at most 16.
        broken_images_limit: most broken images, counted from the start of the process.
        seed: decides order and augmentation.

    Attributes:
        class_names: in the order of the labels, from `prepare` on.
        broken_images: reason by file, of the broken images so far.
    """

    def __init__(
        self,
        dataset: Name,
        classes: Count,
        root: str | None = None,
        download: bool = False,
        folders: Annotated[Sequence[str], Field(min_length=2, max_length=2)] = ("train", "val"),
        images: Annotated[Sequence[Count], Field(min_length=2, max_length=2)] | None = None,
        image_size: Pixels = 224,
        batch_size: Examples = 64,
        drop_last: bool = True,
        crop_area: Annotated[Sequence[PartAboveZero], Field(min_length=2, max_length=2)] | None = None,
        flip: bool = True,
        brightness: Part = 0.0,
        chroma: Part = 0.0,
        cutout: Part = 0.0,
        evaluation_crop: Annotated[float, Field(ge=0.01, le=1)] = 1.0,
        workers: Literal["auto"] | CountOrZero = "auto",
        broken_images_limit: CountOrZero = 0,
        seed: int = 0,
        bits: Annotated[int, Field(ge=8, le=16)] | None = None,
    ) -> None:
        if crop_area is not None and crop_area[0] > crop_area[1]:
            raise ConfigurationError(f"data.crop_area={list(crop_area)}: the least share comes first")
        self._dataset, self._root, self._download, self._folders = dataset, root, download, folders
        self._classes, self._expected = classes, images
        self._image_size, self._evaluation_crop = image_size, evaluation_crop
        self._augmentation = (crop_area, flip, brightness, chroma, cutout)
        self._batch_size, self._drop_last, self._seed = batch_size, drop_last, seed
        self._workers, self._broken_limit, self._bits = workers, broken_images_limit, bits
        self.broken_images: dict[str, str] = {}

    def prepare(self, report: Report) -> None:
        """Finds the images (downloads them if `download` is set) and checks that all are there.

        Raises:
            ConfigurationError: images are missing; the message says what `data.root` must hold and where to get it.
        """
        train, evaluation = open_images(self._dataset, self._root, self._folders, self._download, report)
        self._check_counts(train, evaluation)
        self.class_names = tuple(map(in_utf8, train.class_names))
        train.bits = evaluation.bits = self._bits
        self._broken_limit = min(self._broken_limit, len(train) - 1)
        augmented = training_transform(self._image_size, *self._augmentation)
        self._train_set = TransformedImages(train, augmented, self._broken_limit + 1)
        plain = evaluation_transform(self._image_size, self._evaluation_crop)
        self._evaluation_set = TransformedImages(evaluation, plain, 1)

    def typical_micro_batch(self, micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
        """Returns a micro-batch on the meta device, without data, and the examples of a mini-batch."""
        return typical_images(micro_batches, self._batch_size, self._image_size)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields mini-batches without end; a position is `{"epoch": e, "batch": b}`, the next one to read."""
        batches = self._ahead(self._examples(replicas).train(position, M, replica, replicas), replicas)
        return (Batch(self._counted(batch), batch.position) for batch in batches)

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Yields every evaluation image once, in order; the last mini-batch may have fewer micro-batches."""
        return self.evaluation_share(M, 0, 1)

    def evaluation_share(self, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields the mini-batches number replica, replica + replicas, … of `evaluation`; no image is decoded twice."""
        for batch in self._ahead(self._examples(replicas).evaluation_share(M, replica, replicas), replicas):
            broken = any(of_one for *_, of_one in cast("list[Loaded]", batch.micro_batches))
            read = [one for one in self._counted(batch) if len(one[1][0])]
            if read:
                yield Batch(_divided_again(read, M) if broken else read, batch.position)

    def fingerprint(self) -> str:
        """Returns a digest of the names and labels of the training images."""
        return self._train_set.images.fingerprint()

    def fewest_examples(self, micro_batches: int) -> int | None:
        """Returns the examples of an epoch's smallest micro-batch."""
        return self._examples().fewest_examples(micro_batches)

    def epoch(self, position: Any) -> float:
        """Returns how often the training images were read up to `position`."""
        return self._examples().epoch(position)

    def _examples(self, replicas: int = 1) -> DatasetSource:
        sets, size = (self._train_set, self._evaluation_set), (self._batch_size, self._drop_last)
        with_broken = cast(Any, collate)  # its micro-batches also hold broken images; `_counted` takes them out
        return DatasetSource(*sets, *size, with_broken, loader_workers(self._workers, replicas), self._seed)

    def _ahead(self, batches: Iterator[Batch], replicas: int) -> Iterator[Batch]:
        """Yields the same mini-batches; with loader processes the next ones are made while one is trained on.

        Loader processes are two micro-batches ahead each, which can be less than a mini-batch. Without them,
        examples are read in this process, where only the training thread may seed the generators.
        """
        return read_ahead(batches) if loader_workers(self._workers, replicas) else batches

    def _counted(self, batch: Batch) -> list[MicroBatch]:
        """Returns the batch's micro-batches after counting their broken images.

        Raises:
            ConfigurationError: there are too many of them.
        """
        loaded, limit = cast("list[Loaded]", batch.micro_batches), self._broken_limit
        for image in (image for *_, broken in loaded for image in broken if image.name not in self.broken_images):
            self.broken_images[image.name] = image.reason
            found = len(self.broken_images)
            self.defects = {"broken_images": found}
            if found > limit:
                raise ConfigurationError(
                    f"{image.name} is broken ({image.reason}). It is broken image number {found} of this run, and "
                    f"data.broken_images_limit is {limit}: replace the file, or raise the limit to go on without it"
                )
            log.warning("%s is broken (%s) and left out: %d of at most %d", image.name, image.reason, found, limit)
        return [(images, labels) for images, labels, _ in loaded]

    def _check_counts(self, train: Images, evaluation: Images) -> None:
        found, counts = len(train.class_names), [len(train), len(evaluation)]
        wrong = ""
        if found != self._classes:
            wrong = f"{found} classes, but data.classes={self._classes}: if these are all, set data.classes={found}"
        elif self._expected is not None and counts != list(self._expected):
            wrong = (
                f"{counts[0]} training and {counts[1]} evaluation images, not {' and '.join(map(str, self._expected))}"
            )
            wrong += " (data.images): unpack it again, or set data.images=null to use what is there"
        if wrong:
            raise ConfigurationError(f"data.root={self._root} has {wrong}")


def _divided_again(read: list[MicroBatch], M: int) -> list[MicroBatch]:
    """Divides a mini-batch in which images are missing into micro-batches of equal size."""
    images, labels = (torch.cat([one[side][0] for one in read]) for side in (0, 1))
    return [((images[cut],), (labels[cut],)) for cut in split_evenly(len(labels), min(M, len(labels)))]


# -- in loader processes -----------------------------------------------------------------------------------------------


class TransformedImages(Dataset[Example]):
    """Reads and transforms images.

    Args:
        images: to read.
        transform: bytes to bytes; draws from torch's global generator.
        attempts: how many images are tried for an example: the given one, then the next ones.
    """

    def __init__(self, images: Images, transform: Transform, attempts: int) -> None:
        self.images, self._transform, self._attempts = images, transform, attempts

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Example:
        broken = list[BrokenImageError]()
        for place in range(self._attempts):
            number = (index + place) % len(self)
            try:
                image = self.images.read(number)
            except BrokenImageError as error:
                broken.append(error)
            else:
                return self._transform(image), int(self.images.labels[number]), broken
        return None, -1, broken


def collate(examples: list[Example]) -> Loaded:
    """Returns a micro-batch of the examples that have an image: uint8 [b, 3, S, S] and int64 [b]."""
    images = [image for image, *_ in examples if image is not None]
    labels = [label for image, label, _ in examples if image is not None]
    # default_collate stacks directly into memory shared with the training process.
    stacked: Tensor = default_collate(images) if images else torch.empty(0, dtype=torch.uint8)
    return (stacked,), (torch.tensor(labels, dtype=torch.int64),), [one for *_, broken in examples for one in broken]


def loader_workers(workers: int | str, replicas: int) -> int:
    """Returns the loader processes of one replica; "auto" divides the cores among the replicas on this machine."""
    if workers != "auto":
        return int(workers)
    everywhere, here = (int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    replicas_here = -(-replicas * min(here, everywhere) // everywhere)
    return max(1, min(MOST_WORKERS, usable_cores() // replicas_here))


def typical_images(micro_batches: int, batch_size: int, image_size: int) -> tuple[MicroBatch, int]:
    """Returns a micro-batch on the meta device, without data, and the examples of a mini-batch."""
    count = -(-batch_size // micro_batches)
    images = torch.empty((count, 3, image_size, image_size), dtype=torch.uint8, device="meta")
    return ((images,), (torch.empty(count, dtype=torch.int64, device="meta"),)), batch_size
