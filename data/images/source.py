"""Image classification from files: ImageNet and the transfer data sets of the paper's section 4, or one's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import Dataset, Subset

from ...errors import ConfigurationError
from .. import typical
from ..examples import ExampleSource
from ..source import Batch, Report, check_limits, read_ahead, split_evenly
from .datasets import KNOWN, help_for, open_images
from .files import BrokenImage, Images
from .loading import LoadedPart, TransformedImages, check_workers, collate, loader_workers
from .transforms import evaluation_transform, training_transform

if TYPE_CHECKING:
    from ...micro_batch import MicroBatch

log = logging.getLogger(__name__)


class ImageSource:
    """Mini-batches of images that loader processes read and transform.

    A part is `((images uint8 [b, 3, S, S],), (labels int64 [b],))`: bytes, which the model's first layer normalises
    on its device. Order and augmentation are functions of (seed, epoch, index), so they are the same wherever a run
    resumes and however many loader processes it has.

    A training image that cannot be decoded is replaced by the next good one of the data set, an evaluation image is
    left out. Each is logged and stands in `broken_images`, until there are more than `broken_images_limit`.

    Args:
        dataset: one of `image_datasets.KNOWN`.
        classes: how many the data set has; checked against what is found.
        root: the folder that holds the data set.
        download: fetch the data set if it is not there.
        folders: the training and the evaluation folder, where the data set is an image folder.
        images: training and evaluation images that there must be, to notice half-unpacked folders; None: any number.
        image_size: side S in pixels.
        batch_size: images of a mini-batch, over all micro-batches and replicas.
        drop_last: leave out an epoch's last images where they do not fill a mini-batch.
        crop_area, flip, brightness, chroma, cutout: see `transforms.training_transform`.
        evaluation_crop: share of height and width that the central crop of evaluation keeps.
        workers: loader processes of a replica; "auto": as many as its share of the machine's cores, at most 16.
        broken_images_limit: give up at more broken images than this, counted from the start of the process.
        cache_dir: where lists of files are kept; None for `$GPIPE_CACHE` or `~/.cache/gpipe`.
        seed: decides order and augmentation.

    Attributes:
        class_names: in the order of the labels, from `prepare` on.
        broken_images: the broken images met so far: file and reason.

    Raises:
        ValueError: a value out of its limits.
    """

    class_names: tuple[str, ...] = ()

    def __init__(
        self,
        dataset: str,
        classes: int,
        root: str | None = None,
        download: bool = False,
        folders: Sequence[str] = ("train", "val"),
        images: Sequence[int] | None = None,
        image_size: int = 224,
        batch_size: int = 64,
        drop_last: bool = True,
        crop_area: Sequence[float] | None = None,
        flip: bool = True,
        brightness: float = 0.0,
        chroma: float = 0.0,
        cutout: float = 0.0,
        evaluation_crop: float = 1.0,
        workers: int | str = "auto",
        broken_images_limit: int = 0,
        cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        if dataset not in KNOWN:
            raise ConfigurationError(f"data.dataset={dataset}: choose one of {', '.join(KNOWN)}")
        _check_pairs(folders, images, crop_area)
        check_workers(workers)
        check_limits(
            classes=(classes, 1, None),
            image_size=(image_size, 1, None),
            batch_size=(batch_size, 1, None),
            brightness=(brightness, 0, 1),
            chroma=(chroma, 0, 1),
            cutout=(cutout, 0, 1),
            evaluation_crop=(evaluation_crop, 0.01, 1),
            broken_images_limit=(broken_images_limit, 0, None),
        )
        self._dataset, self._root, self._download, self._folders = dataset, root, download, folders
        self._classes, self._expected, self._cache_dir = classes, images, cache_dir
        self._image_size, self._evaluation_crop = image_size, evaluation_crop
        self._augmentation = (crop_area, flip, brightness, chroma, cutout)
        self._batch_size, self._drop_last, self._seed = batch_size, drop_last, seed
        self._workers, self._replicas, self._broken_limit = workers, 1, broken_images_limit
        self._sets: tuple[TransformedImages, TransformedImages] | None = None
        self.broken_images: dict[str, str] = {}

    def prepare(self, report: Report) -> None:
        """Find the images (download them if that is wanted and needed), and check that all are there.

        Raises:
            ConfigurationError: what is wrong with `data.root`, what it must hold, and where to get that.
        """
        cache = Path(self._cache_dir or os.environ.get("GPIPE_CACHE") or "~/.cache/gpipe").expanduser()
        train, evaluation = open_images(self._dataset, self._root, self._folders, self._download, cache, report)
        self._check_counts(train, evaluation)
        self.class_names = train.class_names
        self._broken_limit = min(self._broken_limit, len(train) - 1)
        self._sets = (
            TransformedImages(train, training_transform(self._image_size, *self._augmentation), self._broken_limit + 1),
            TransformedImages(evaluation, evaluation_transform(self._image_size, self._evaluation_crop), 1),
        )

    def typical_micro_batch(self, M: int, longest: bool) -> tuple[MicroBatch, int]:
        """Shapes of a micro-batch, without data: see `typical`."""
        return typical.images(M, self._batch_size, self._image_size)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Mini-batches without end; a position is `{"epoch": e, "batch": b}`, the next one to read."""
        self._replicas = replicas
        batches = self._ahead(self._examples().train(position, M, replica, replicas))
        return (Batch([_part(loaded) for loaded in self._loaded(batch)], batch.position) for batch in batches)

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Every evaluation image once, in order; the last mini-batch may have fewer micro-batches."""
        return self.evaluation_share(M, 0, 1)

    def evaluation_share(self, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Of the mini-batches of `evaluation` the numbers replica, replica + replicas, …: no image is decoded twice."""
        count, size = len(self._prepared[1]), self._batch_size
        firsts = range(replica * size, count, replicas * size)
        mine = Subset(self._prepared[1], [i for first in firsts for i in range(first, min(first + size, count))])
        for batch in self._ahead(self._examples(mine).evaluation(M)):
            loaded = [part for part in self._loaded(batch) if len(part.labels)]
            if any(part.broken for part in loaded):
                loaded = _divided_again(loaded, M)
            if loaded:
                yield Batch([_part(part) for part in loaded], batch.position)

    @property
    def defects(self) -> dict[str, int]:
        """How many images were met that could not be read."""
        return {"broken_images": len(self.broken_images)}

    def fingerprint(self) -> str:
        """Of the names and labels of the training images."""
        return self._prepared[0].fingerprint()

    def epoch(self, position: Any) -> float:
        """How often the training images were read up to `position`."""
        return self._examples().epoch(position)

    @property
    def _prepared(self) -> tuple[TransformedImages, TransformedImages]:
        if self._sets is None:
            raise RuntimeError("ImageSource: call prepare() before reading")
        return self._sets

    def _examples(self, evaluation: Dataset[Any] | None = None) -> ExampleSource:
        return ExampleSource(
            self._prepared[0],
            evaluation or self._prepared[1],
            self._batch_size,
            self._drop_last,
            cast(Any, collate),  # its micro-batches also tell of broken images; _loaded takes them out
            self._loader_workers,
            self._seed,
        )

    @property
    def _loader_workers(self) -> int:
        return loader_workers(self._workers, self._replicas)

    def _ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same mini-batches, the next ones being put together while one is trained on.

        Loader processes are two micro-batches ahead each, which can be less than a mini-batch. Without them they
        are read in this process, where only the training thread may seed the generators.
        """
        return read_ahead(batches) if self._loader_workers else batches

    def _loaded(self, batch: Batch) -> list[LoadedPart]:
        """The batch's micro-batches, once their broken images are counted.

        Raises:
            ConfigurationError: too many of them.
        """
        loaded = cast("list[LoadedPart]", batch.micro_batches)
        for broken in (broken for part in loaded for broken in part.broken):
            if broken.name not in self.broken_images:
                self._count(broken)
        return loaded

    def _count(self, broken: BrokenImage) -> None:
        self.broken_images[broken.name] = broken.reason
        found, limit = len(self.broken_images), self._broken_limit
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
        if len(train) < (self._batch_size if self._drop_last else 1):
            raise ConfigurationError(
                f"data.batch_size={self._batch_size}, but data.root={self._root} has {len(train)} training images: "
                "lower data.batch_size, or set data.drop_last=false"
            )


def _check_pairs(folders: Sequence[str], images: Sequence[int] | None, crop_area: Sequence[float] | None) -> None:
    for key, pair, form in (
        ("folders", folders, "[train,val], a training and an evaluation folder"),
        ("images", images, "[1000,100], numbers of training and evaluation images, or null"),
        ("crop_area", crop_area, "[0.1,1.0], the least and the largest share of the area, or null"),
    ):
        if pair is not None and (isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2):
            raise ConfigurationError(f"data.{key}={pair}: give two values, such as {form}")
    if crop_area is not None and not 0 < crop_area[0] <= crop_area[1] <= 1:
        raise ConfigurationError(f"data.crop_area={list(crop_area)}: must be 0 < least ≤ largest ≤ 1")


def _part(loaded: LoadedPart) -> MicroBatch:
    return (loaded.images,), (loaded.labels,)


def _divided_again(loaded: list[LoadedPart], M: int) -> list[LoadedPart]:
    """Parts of even size of a mini-batch in which images are missing."""
    images, labels = torch.cat([part.images for part in loaded]), torch.cat([part.labels for part in loaded])
    slices = split_evenly(len(labels), min(M, len(labels)))
    return [LoadedPart(images[part], labels[part], ()) for part in slices]
