"""Yields mini-batches of images from files: ImageNet, the paper's transfer data sets (section 4), or a user's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field

from ...errors import ConfigurationError
from ...micro_batch import MicroBatch
from ...typed_section import Count, CountOrZero, Examples, Part, PartAboveZero, Pixels
from ..source import Batch, Report, Source, read_ahead, split_evenly
from ..torch_datasets import DatasetSource
from .datasets import help_for, open_images
from .files import BrokenImageError, Images
from .loading import LoadedMicroBatch, TransformedImages, collate, loader_workers, typical_images
from .transforms import evaluation_transform, training_transform

log = logging.getLogger(__name__)


class ImageSource(Source):
    """Yields mini-batches of images that loader processes read and transform.

    A micro-batch is `((images uint8 [b, 3, S, S],), (labels int64 [b],))`: bytes, which the model's first layer scales
    on its device. Order and augmentation depend on (seed, epoch, index) alone, not on where a run resumes or on the
    number of loader processes.

    A training image that cannot be decoded is replaced by the next good one of the data set, an evaluation image is
    left out. Each is logged and listed in `broken_images`; more than `broken_images_limit` of them end the run.

    Args:
        dataset: one of `datasets.DATASETS`.
        classes: number of classes; checked.
        root: the folder that holds the data set.
        download: fetch the data set if it is not there.
        folders: the training and the evaluation folder of an image folder.
        images: expected numbers of training and evaluation images, to notice half-unpacked folders; None: any.
        image_size: side S in pixels.
        batch_size: images of a mini-batch, over all micro-batches and replicas.
        drop_last: leave out an epoch's last images if they do not fill a mini-batch.
        crop_area, flip, brightness, chroma, cutout: see `transforms.training_transform`.
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
        dataset: str,
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
    ) -> None:
        if crop_area is not None and crop_area[0] > crop_area[1]:
            raise ConfigurationError(f"data.crop_area={list(crop_area)}: the least share comes first")
        self._dataset, self._root, self._download, self._folders = dataset, root, download, folders
        self._classes, self._expected = classes, images
        self._image_size, self._evaluation_crop = image_size, evaluation_crop
        self._augmentation = (crop_area, flip, brightness, chroma, cutout)
        self._batch_size, self._drop_last, self._seed = batch_size, drop_last, seed
        self._workers, self._broken_limit = workers, broken_images_limit
        self.broken_images: dict[str, str] = {}

    def prepare(self, report: Report) -> None:
        """Finds the images (downloads them if `download` is set) and checks that all are there.

        Raises:
            ConfigurationError: images are missing; the message says what `data.root` must hold and where to get it.
        """
        train, evaluation = open_images(self._dataset, self._root, self._folders, self._download, report)
        self._check_counts(train, evaluation)
        self.class_names = train.class_names
        self.prepared_defects = {"other_files": train.others + evaluation.others}
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
        return (Batch([one.tensors for one in self._loaded(batch)], batch.position) for batch in batches)

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Yields every evaluation image once, in order; the last mini-batch may have fewer micro-batches."""
        return self.evaluation_share(M, 0, 1)

    def evaluation_share(self, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields the mini-batches number replica, replica + replicas, … of `evaluation`; no image is decoded twice."""
        batches = self._examples(replicas).evaluation_share(M, replica, replicas)
        for batch in self._ahead(batches, replicas):
            loaded = [one for one in self._loaded(batch) if len(one.labels)]
            if any(one.broken for one in loaded):
                loaded = _divided_again(loaded, M)
            if loaded:
                yield Batch([one.tensors for one in loaded], batch.position)

    def fingerprint(self) -> str:
        """Returns a digest of the names and labels of the training images."""
        return self._train_set.images.fingerprint()

    def epoch(self, position: Any) -> float:
        """Returns how often the training images were read up to `position`."""
        return self._examples().epoch(position)

    def _examples(self, replicas: int = 1) -> DatasetSource:
        sets, size = (self._train_set, self._evaluation_set), (self._batch_size, self._drop_last)
        with_broken = cast(Any, collate)  # its micro-batches also hold broken images; `_loaded` counts them
        return DatasetSource(*sets, *size, with_broken, loader_workers(self._workers, replicas), self._seed)

    def _ahead(self, batches: Iterator[Batch], replicas: int) -> Iterator[Batch]:
        """Yields the same mini-batches; with loader processes the next ones are made while one is trained on.

        Loader processes are two micro-batches ahead each, which can be less than a mini-batch. Without them,
        examples are read in this process, where only the training thread may seed the generators.
        """
        return read_ahead(batches) if loader_workers(self._workers, replicas) else batches

    def _loaded(self, batch: Batch) -> list[LoadedMicroBatch]:
        """Returns the batch's micro-batches after counting their broken images.

        Raises:
            ConfigurationError: there are too many of them.
        """
        loaded = cast("list[LoadedMicroBatch]", batch.micro_batches)
        for broken in (broken for one in loaded for broken in one.broken):
            if broken.name not in self.broken_images:
                self._count(broken)
        return loaded

    def _count(self, broken: BrokenImageError) -> None:
        self.broken_images[broken.name] = broken.reason
        found, limit = len(self.broken_images), self._broken_limit
        self.defects = {"broken_images": found}
        if found > limit:
            raise ConfigurationError(
                f"{broken.name} is broken ({broken.reason}). It is broken image number {found} of this run, and "
                f"data.broken_images_limit is {limit}: replace the file, or raise the limit to go on without it"
            )
        log.warning("%s is broken (%s) and left out: %d of at most %d", broken.name, broken.reason, found, limit)

    def _check_counts(self, train: Images, evaluation: Images) -> None:
        found = len(train.class_names)
        if found != self._classes:
            raise ConfigurationError(
                f"data.root={self._root} has {found} classes, but data.classes={self._classes}: if these are all, "
                f"set data.classes={found}. {help_for(self._dataset)}"
            )
        counts = [len(train), len(evaluation)]
        if self._expected is not None and counts != list(self._expected):
            raise ConfigurationError(
                f"data.root={self._root} has {counts[0]} training and {counts[1]} evaluation images, not "
                f"{self._expected[0]} and {self._expected[1]} (data.images): unpack it again, or set data.images=null "
                f"to use what is there. {help_for(self._dataset)}"
            )


def _divided_again(loaded: list[LoadedMicroBatch], M: int) -> list[LoadedMicroBatch]:
    """Divides a mini-batch in which images are missing into micro-batches of equal size."""
    images, labels = torch.cat([one.images for one in loaded]), torch.cat([one.labels for one in loaded])
    slices = split_evenly(len(labels), min(M, len(labels)))
    return [LoadedMicroBatch(images[cut], labels[cut], ()) for cut in slices]
