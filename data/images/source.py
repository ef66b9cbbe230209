"""Yields mini-batches of images from files: ImageNet, the paper's transfer data sets (section 4), or a user's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import Dataset

from ...cpu import usable_cores
from ...disk import write_whole
from ...errors import ConfigurationError
from ...micro_batch import MicroBatch
from ...typed_section import Count, CountOrZero, Examples, NotNegative, Part, PartAboveZero, Pixels
from ..source import Batch, Report, read_ahead
from ..torch_datasets import DatasetSource, stack_examples
from .datasets import Name, open_images, read_folder
from .files import ImageFiles
from .transforms import Transform, evaluation_transform, mixture, training_transform

MOST_WORKERS = 16  # chosen by "auto": more would only fill the memory with mini-batches

CLASSES = "classes.json"  # in a run's folder of vocabularies: the names of the classes


class SquareImages(DatasetSource):
    """Knows the shapes of its mini-batches: bytes of three channels and `_image_size` pixels a side.

    Attributes:
        class_names: names of the classes, by label.
    """

    class_names: Sequence[str] = ()

    _image_size: int
    _mixed: tuple[float, float, int] | None = None

    def typical_micro_batch(self, micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
        """Returns a micro-batch on the meta device, without data, and the examples of a mini-batch."""
        count = -(-self._batch_size // micro_batches)
        images = torch.empty((count, 3, self._image_size, self._image_size), dtype=torch.uint8, device="meta")
        labels = torch.empty(count, dtype=torch.int64, device="meta")
        shares = None if self._mixed is None else torch.empty(count, self._mixed[2], device="meta")
        return ((images,), (labels if shares is None else shares,)), self._batch_size

    def keep_vocabularies(self, folder: Path) -> None:
        """Writes the names of the classes, by which a run's predictions are named."""
        folder.mkdir(exist_ok=True)
        write_whole(folder / CLASSES, json.dumps(list(self.class_names), indent=0) + "\n")

    def first_images(self, count: int) -> Tensor:
        """Returns the first images of the first epoch as they are trained on, uint8 [n, 3, S, S]."""
        return self.read(self._train_set, next(self._keys(0, 0, 1, 0, 1))[:count])[0][0]

    def evaluation_image(self, index: int) -> Tensor:
        """Returns image number `index` as an evaluation sees it, uint8 [3, S, S]."""
        return self.read(self._evaluation_set, [(0, index)])[0][0][0]


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
        crop_area, flip, brightness, chroma, cutout, rand_augment, random_erasing: see `transforms.training_transform`.
        mixup, cutmix: see `transforms.mixture`; each training image is then mixed with another of the data set, which
            is drawn, and targets are the classes' shares, float32 [b, classes], in evaluations too.
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
        rand_augment: Annotated[int, Field(ge=0, le=10)] = 0,
        random_erasing: Part = 0.0,
        mixup: NotNegative = 0.0,
        cutmix: NotNegative = 0.0,
        evaluation_crop: Annotated[float, Field(ge=0.01, le=1)] = 1.0,
        workers: Literal["auto"] | CountOrZero = "auto",
        seed: int = 0,
    ) -> None:
        if crop_area is not None and crop_area[0] > crop_area[1]:
            raise ConfigurationError(f"data.crop_area={list(crop_area)}: the least share comes first")
        self._dataset, self._root, self._folders, self._held_out = dataset, root, folders, held_out
        self._classes, self._expected = classes, images
        self._image_size, self._evaluation_crop = image_size, evaluation_crop
        self._augmentation = (crop_area, flip, brightness, chroma, cutout, rand_augment, random_erasing)
        self._mixed = (mixup, cutmix, classes) if mixup or cutmix else None
        self._batch_size, self._drop_last, self._seed = batch_size, drop_last, seed
        self._loaders = workers

    def prepare(self, report: Report) -> None:
        """Finds the images and checks that all are there.

        Raises:
            ConfigurationError: images are missing; the message says what `data.root` must hold and where to get it.
        """
        train, evaluation = open_images(self._dataset, self._root, self._folders, self._held_out, report)
        self._check_counts(train, evaluation)
        self._names, self.class_names = train.fingerprint(), train.class_names
        augmented = TransformedImages(train, training_transform(self._image_size, *self._augmentation))
        plain = TransformedImages(evaluation, evaluation_transform(self._image_size, self._evaluation_crop))
        examples: tuple[Dataset[Any], Dataset[Any]] = augmented, plain
        if self._mixed is not None:
            examples = MixedImages(augmented, *self._mixed), MixedImages(plain, 0, 0, self._classes)
        super().__init__(*examples, self._batch_size, self._drop_last, seed=self._seed)

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
        """Returns the same mini-batches; with loader processes the next ones are made while one is trained on.

        Loader processes are two micro-batches ahead each, which can be less than a mini-batch. Without them,
        examples are read in this process, where only the training thread may seed the generators.
        """
        return read_ahead(batches) if self._workers else batches

    def _check_counts(self, train: ImageFiles, evaluation: ImageFiles) -> None:
        """Refuses another number of classes, or of images, than the configuration says."""
        found, counts = len(train.class_names), [len(train), len(evaluation)]
        if found != self._classes:
            raise ConfigurationError(
                f"data.root={self._root} has {found} classes, but data.classes={self._classes}: if these are all, set "
                f"data.classes={found}"
            )
        if self._expected is not None and counts != list(self._expected):
            wanted = " and ".join(map(str, self._expected))
            raise ConfigurationError(
                f"data.root={self._root} has {counts[0]} training and {counts[1]} evaluation images, not {wanted} "
                "(data.images): unpack it again, or set data.images=null to use what is there"
            )


class ImagesOfRun(ImageSource):
    """Yields images for a trained model, in order, as an evaluation sees them. `train` yields one black mini-batch.

    Args:
        vocabularies: the run's folder, with the names of its classes; runs of earlier releases have none.
        image_size, evaluation_crop, batch_size: as in `ImageSource`.
        files: paths of images without labels.
        test: in place of them a folder with a folder for each class; labels are the numbers that these have in the run.
    """

    def __init__(
        self,
        vocabularies: str,
        image_size: Pixels,
        batch_size: Examples = 64,
        evaluation_crop: float = 1.0,
        files: Sequence[str] = (),
        test: str | None = None,
    ) -> None:
        self._image_size, self._batch_size, self._evaluation_crop = image_size, batch_size, evaluation_crop
        self._seed, self._loaders, self._files, self._test = 0, "auto", files, test
        if (kept := Path(vocabularies) / CLASSES).is_file():
            self.class_names = json.loads(kept.read_text(encoding="utf-8"))

    def prepare(self, report: Report) -> None:
        """Finds the images.

        Raises:
            ConfigurationError: there are none, or a class is not the run's.
        """
        images = ImageFiles(Path(), self._files, [0] * len(self._files), ())
        if self._test is not None:
            images = read_folder(Path(self._test), report, self.class_names)
        self._evaluation_set = TransformedImages(images, evaluation_transform(self._image_size, self._evaluation_crop))
        self._collate = stack_examples

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields the one mini-batch, which shows the shapes."""
        images = torch.zeros((1, 3, self._image_size, self._image_size), dtype=torch.uint8)
        yield Batch([((images,), (torch.zeros(1, dtype=torch.int64),))] * M, None)

    def keep_vocabularies(self, folder: Path) -> None:
        """Writes nothing: the classes are those of the run."""


# -- in loader processes -----------------------------------------------------------------------------------------------


class TransformedImages(Dataset[tuple[Tensor, int]]):
    """Reads and transforms images; an example is uint8 [3, S, S] and its label.

    Args:
        images: the images to read.
        transform: turns bytes into bytes; draws from torch's global generator.
    """

    def __init__(self, images: ImageFiles, transform: Transform) -> None:
        self._images, self._transform = images, transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(self._images.read(index)), int(self._images.labels[index])


class MixedImages(Dataset[tuple[Tensor, Tensor]]):
    """Mixes each image with another that is drawn. Without mixup and cutmix it only turns labels into shares.

    An example is uint8 [3, S, S] and the shares of the classes, float32 [classes].
    """

    def __init__(self, images: TransformedImages, mixup: float, cutmix: float, classes: int) -> None:
        self._images, self._classes, self._mix = images, classes, mixture(mixup, cutmix, classes)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._mix is None:
            image, label = self._images[index]
            return image, one_hot(torch.tensor(label), self._classes).float()
        chosen = (index, int(torch.randint(len(self._images), ())))
        images, labels = zip(*(self._images[place] for place in chosen), strict=True)
        return self._mix(torch.stack(images), torch.tensor(labels))


def loader_workers(workers: int | str, replicas: int) -> int:
    """Returns the loader processes of one replica; "auto" divides the cores among the replicas on this machine."""
    if workers != "auto":
        return int(workers)
    everywhere, here = (int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    replicas_here = -(-replicas * min(here, everywhere) // everywhere)
    return max(1, min(MOST_WORKERS, usable_cores() // replicas_here))
