"""Yields mini-batches of images from files: ImageNet, the paper's transfer data sets (section 4), or a user's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import Dataset

from ...disk import write_whole
from ...errors import ConfigurationError
from ...micro_batch import MicroBatch
from ...typed_section import Count, CountOrZero, Examples, NotNegative, Part, PartAboveZero, Pixels
from ..source import Batch, Report
from ..torch_datasets import DatasetSource, stack_examples
from .datasets import Name, open_images, read_folder
from .files import ImageFiles
from .transforms import Mixture, Transform, evaluation_transform, mixture, training_transform

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
        dataset: name of the data set or its form, see `datasets.open_images`.
        classes: number of classes; checked.
        root: the folder that holds the data set.
        folders: the training and the evaluation folder of an image folder.
        held_out: share of the training images that is evaluated on, chosen by their content; None: `folders` are two.
        images: expected numbers of training and evaluation images, to notice half-unpacked folders; None: any.
        image_size: side S in pixels.
        batch_size: images of a mini-batch, over all micro-batches and replicas.
        drop_last: leave out an epoch's last images if they do not fill a mini-batch.
        crop_area, flip, brightness, chroma, cutout, rand_augment, random_erasing: see `transforms.training_transform`.
        mixup, cutmix: parameters of `transforms.mixture`. If one is not 0, each training image is mixed with another of
            the data set, which is drawn, and targets are the classes' shares, float32 [b, classes], in evaluations too.
        evaluation_crop: share of height and width that evaluation keeps.
        workers: loader processes of a replica, see `DatasetSource`.
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
        self._workers = workers

    def prepare(self, report: Report) -> None:
        """Finds the images and checks that all are there.

        Raises:
            ConfigurationError: images are missing; the message says what `data.root` must hold and where to get it.
        """
        train, evaluation = open_images(self._dataset, self._root, self._folders, self._held_out, report)
        self._check_counts(train, evaluation)
        self._names, self.class_names = train.fingerprint(), train.class_names
        classes, mix = (None, None) if self._mixed is None else (self._classes, mixture(*self._mixed))
        augmentation = training_transform(self._image_size, *self._augmentation)
        resizing = evaluation_transform(self._image_size, self._evaluation_crop)
        augmented = TransformedImages(train, augmentation, classes, mix)
        plain = TransformedImages(evaluation, resizing, classes)
        super().__init__(augmented, plain, self._batch_size, self._drop_last, None, self._workers, self._seed)

    def fingerprint(self) -> str:
        """Returns a digest of the names and labels of the training images."""
        return self._names

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
        test: folder with a folder for each class, in place of files; labels are the run's numbers of the classes.
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
        self._seed, self._workers, self._files, self._test = 0, "auto", files, test
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


class TransformedImages(Dataset[tuple[Tensor, Any]]):
    """Reads and transforms images; an example is uint8 [3, S, S] and its label, or the shares of the C classes.

    Args:
        images: the images to read.
        transform: turns bytes into bytes; draws from torch's global generator.
        classes: C, to return shares, float32 [C]; None: labels.
        mix: mixes each image with another that is drawn; None: no image is mixed.
    """

    def __init__(
        self, images: ImageFiles, transform: Transform, classes: int | None = None, mix: Mixture | None = None
    ) -> None:
        self._images, self._transform, self._classes, self._mix = images, transform, classes, mix

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        if self._mix is None:
            image, label = self._transformed(index)
            return image, label if self._classes is None else one_hot(torch.tensor(label), self._classes).float()
        chosen = (index, int(torch.randint(len(self), ())))
        images, labels = zip(*(self._transformed(place) for place in chosen), strict=True)
        return self._mix(torch.stack(images), torch.tensor(labels))

    def _transformed(self, index: int) -> tuple[Tensor, int]:
        return self._transform(self._images.read(index)), int(self._images.labels[index])
