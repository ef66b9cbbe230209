"""Yields mini-batches of images from files: ImageNet, the paper's transfer data sets (section 4), or a user's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from ...cpu import usable_cores
from ...errors import ConfigurationError
from ...micro_batch import MicroBatch
from ...typed_section import Count, CountOrZero, Examples, Part, PartAboveZero, Pixels
from ..source import Batch, Report, read_ahead
from ..torch_datasets import DatasetSource, stack_examples
from .datasets import Name, open_images
from .files import BrokenImage, Images
from .transforms import Transform, evaluation_transform, training_transform

MOST_WORKERS = 16  # chosen by "auto": more would only fill the memory with mini-batches

Example: TypeAlias = "tuple[Tensor, int] | BrokenImage"
"""One transformed image, uint8 [3, S, S], and its label."""


class SquareImages(DatasetSource):
    """Knows the shapes of its mini-batches: bytes of three channels and `_image_size` pixels a side."""

    _image_size: int

    def typical_micro_batch(self, micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
        """Returns a micro-batch on the meta device, without data, and the examples of a mini-batch."""
        count = -(-self._batch_size // micro_batches)
        images = torch.empty((count, 3, self._image_size, self._image_size), dtype=torch.uint8, device="meta")
        return ((images,), (torch.empty(count, dtype=torch.int64, device="meta"),)), self._batch_size


class ImageSource(SquareImages):
    """Yields mini-batches of images that loader processes read and transform.

    A micro-batch is `((images uint8 [b, 3, S, S],), (labels int64 [b],))`: bytes, which the model's first layer scales
    on its device. Order and augmentation depend on (seed, epoch, index) alone, not on where a run resumes or on the
    number of loader processes.

    Args:
        dataset: see `datasets.open_images`.
        classes: number of classes; checked.
        root: the folder that holds the data set.
        folders: the training and the evaluation folder of an image folder.
        held_out: share of the training images that is evaluated on, chosen by their content; None: `folders` are two.
        images: expected numbers of training and evaluation images, to notice half-unpacked folders; None: any.
        image_size: side S in pixels.
        batch_size: images of a mini-batch, over all micro-batches and replicas.
        drop_last: leave out an epoch's last images if they do not fill a mini-batch.
        crop_area, flip, brightness, chroma, cutout: see `transforms.training_transform`.
        bits: that images of 16 bits use, as 12; None: as the file says, else 16.
        evaluation_crop: share of height and width that evaluation keeps.
        workers: loader processes of a replica; "auto": as many as its share of the machine's cores, at most 16.
        seed: decides order and augmentation.
    """

    def __init__(
        self,
        dataset: Name,
        classes: Count,
        root: str | None = None,
        folders: Annotated[Sequence[str], Field(min_length=2, max_length=2)] = ("train", "val"),
        held_out: Annotated[float, Field(gt=0, lt=1)] | None = None,
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
        seed: int = 0,
        bits: Annotated[int, Field(ge=8, le=16)] | None = None,
    ) -> None:
        if crop_area is not None and crop_area[0] > crop_area[1]:
            raise ConfigurationError(f"data.crop_area={list(crop_area)}: the least share comes first")
        self._dataset, self._root, self._folders, self._held_out = dataset, root, folders, held_out
        self._classes, self._expected = classes, images
        self._image_size, self._evaluation_crop = image_size, evaluation_crop
        self._augmentation = (crop_area, flip, brightness, chroma, cutout)
        self._batch_size, self._drop_last, self._seed = batch_size, drop_last, seed
        self._loaders, self._bits = workers, bits

    def prepare(self, report: Report) -> None:
        """Finds the images and checks that all are there.

        Raises:
            ConfigurationError: images are missing; the message says what `data.root` must hold and where to get it.
        """
        train, evaluation = open_images(self._dataset, self._root, self._folders, self._held_out, report)
        self._check_counts(train, evaluation)
        train.bits = evaluation.bits = self._bits
        self._names = train.fingerprint()
        augmented = TransformedImages(train, training_transform(self._image_size, *self._augmentation))
        plain = TransformedImages(evaluation, evaluation_transform(self._image_size, self._evaluation_crop))
        collated = cast(Any, collate)
        super().__init__(augmented, plain, self._batch_size, self._drop_last, collated, seed=self._seed)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields mini-batches without end; a position is `{"epoch": e, "batch": b}`, the next one to read."""
        self._workers = loader_workers(self._loaders, replicas)
        return self._ahead(super().train(position, M, replica, replicas))

    def evaluation_share(self, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields the mini-batches number replica, replica + replicas, … of `evaluation`; no image is decoded twice."""
        self._workers = loader_workers(self._loaders, replicas)
        return self._ahead(super().evaluation_share(M, replica, replicas))

    def fingerprint(self) -> str:
        """Returns a digest of the names and labels of the training images."""
        return self._names

    def _ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields the same mini-batches; with loader processes the next ones are made while one is trained on.

        Loader processes are two micro-batches ahead each, which can be less than a mini-batch. Without them,
        examples are read in this process, where only the training thread may seed the generators.

        Raises:
            BrokenImage: an image cannot be decoded.
        """
        for batch in read_ahead(batches) if self._workers else batches:
            for loaded in cast("list[MicroBatch | BrokenImage]", batch.micro_batches):
                if isinstance(loaded, BrokenImage):
                    raise loaded
            yield batch

    def _check_counts(self, train: Images, evaluation: Images) -> None:
        found, counts = len(train.class_names), [len(train), len(evaluation)]
        wrong = ""
        if found != self._classes:
            wrong = f"{found} classes, but data.classes={self._classes}: if these are all, set data.classes={found}"
        elif self._expected is not None and counts != list(self._expected):
            wanted = " and ".join(map(str, self._expected))
            wrong = f"{counts[0]} training and {counts[1]} evaluation images, not {wanted}"
            wrong += " (data.images): unpack it again, or set data.images=null to use what is there"
        if wrong:
            raise ConfigurationError(f"data.root={self._root} has {wrong}")


# -- in loader processes -----------------------------------------------------------------------------------------------


class TransformedImages(Dataset[Example]):
    """Reads and transforms images.

    Args:
        images: to read.
        transform: bytes to bytes; draws from torch's global generator.
    """

    def __init__(self, images: Images, transform: Transform) -> None:
        self._images, self._transform = images, transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Example:
        try:
            return self._transform(self._images.read(index)), int(self._images.labels[index])
        except BrokenImage as error:
            return error  # raised here, it would come with the traceback of a loader process


def collate(examples: list[Example]) -> MicroBatch | BrokenImage:
    """Returns a micro-batch: uint8 [b, 3, S, S] and int64 [b]; or the first broken image."""
    broken = next((example for example in examples if isinstance(example, BrokenImage)), None)
    return stack_examples(examples) if broken is None else broken


def loader_workers(workers: int | str, replicas: int) -> int:
    """Returns the loader processes of one replica; "auto" divides the cores among the replicas on this machine."""
    if workers != "auto":
        return int(workers)
    everywhere, here = (int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    replicas_here = -(-replicas * min(here, everywhere) // everywhere)
    return max(1, min(MOST_WORKERS, usable_cores() // replicas_here))
