"""Opens the paper's image data sets (section 4) on disk, and explains what is missing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import ConfigurationError
from ..source import Report
from . import imagenet
from .files import ImageArray, ImageFiles, Images
from .folders import is_flat, read_flat, read_folder
from .tars import NEEDS as SHARDS
from .tars import read_tars, tars_of


class ImageDataset(NamedTuple):
    """Describes a data set.

    Attributes:
        needs: what `data.root` must hold, and where to get it.
        torchvision: the class of torchvision.datasets that lists its files; empty for an image folder.
        splits: that class's arguments for training and evaluation.
        download: size of what `data.download=true` fetches; empty if a program cannot fetch it.
    """

    needs: str
    torchvision: str = ""
    splits: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
    download: str = ""


CIFAR = ({"train": True}, {"train": False})
TRAIN, TRAINVAL = ({"split": "train"}, {"split": "test"}), ({"split": "trainval"}, {"split": "test"})
FOLDERS = "a folder for each of data.folders, in each of them a folder of images for each class; or, for each, "
CARS = (
    "stanford_cars/ with cars_train/*.jpg, cars_test/*.jpg, devkit/ and cars_test_annos_withlabels.mat. Its own "
    "site is gone: look for the files at https://github.com/pytorch/vision/issues/7545"
)
DATASETS = {
    "image_folder": ImageDataset(FOLDERS + SHARDS),
    "imagenet": ImageDataset(imagenet.NEEDS),
    "cifar10": ImageDataset(
        "cifar-10-batches-py/ of https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "CIFAR10", CIFAR, "170 MB"
    ),
    "cifar100": ImageDataset(
        "cifar-100-python/ of https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "CIFAR100", CIFAR, "170 MB"
    ),
    "stanford_cars": ImageDataset(CARS, "StanfordCars", TRAIN),
    "oxford_pets": ImageDataset(
        "oxford-iiit-pet/ of https://www.robots.ox.ac.uk/~vgg/data/pets/", "OxfordIIITPet", TRAINVAL, "800 MB"
    ),
    "food101": ImageDataset(
        "food-101/ of http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz", "Food101", TRAIN, "5 GB"
    ),
    "fgvc_aircraft": ImageDataset(
        "fgvc-aircraft-2013b/ of https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
        "FGVCAircraft", TRAINVAL, "2.8 GB",
    ),
}  # fmt: skip


def open_images(
    dataset: str, root: str | None, folders: Sequence[str], download: bool, report: Report
) -> tuple[Images, Images]:
    """Returns the training and the evaluation images of a data set.

    Args:
        dataset: a key of `DATASETS`.
        root: the folder that holds it.
        folders: the two splits of an image folder.
        download: whether torchvision may fetch what is missing.

    Raises:
        ConfigurationError: something is missing; the message says what belongs where and where to get it.
    """
    known = DATASETS[dataset]
    try:
        if root is None:
            raise ConfigurationError("data.root is not set")
        if download and not known.download:
            raise ConfigurationError(f"data.download=true: {dataset} cannot be downloaded by program")
        place = Path(root).expanduser()
        if known.torchvision:
            return _from_torchvision(known, place, download, report)
        return _on_disk(place, folders, dataset == "imagenet", report)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}. {help_for(dataset)}") from error


def _on_disk(root: Path, folders: Sequence[str], is_imagenet: bool, report: Report) -> tuple[Images, Images]:
    """Returns the images of both splits: in class folders, in tars, or, of ImageNet, flat with a label file."""
    base = imagenet.folder_of_splits(root, folders[0]) if is_imagenet else root
    folders_of = partial(imagenet.wnids_of, root) if is_imagenet else None

    def read(folder: str, tars: Sequence[Path], known: Sequence[str] | None = None) -> Images:
        if tars:
            return read_tars(tars, report, known, folders_of)
        if known is not None and folders_of is not None and is_flat(base / folder):
            return read_flat(base / folder, known, folders_of)
        return read_folder(base / folder, report, known)

    train_tars, evaluation_tars = tars_of(base, folders)
    train = read(folders[0], train_tars)
    return train, read(folders[1], evaluation_tars, train.class_names)


def help_for(dataset: str) -> str:
    """Returns what `data.root` must hold and where to get it."""
    known = DATASETS[dataset]
    fetch = f"; or data.download=true ({known.download})" if known.download else ""
    return f"For data.dataset={dataset}, data.root must hold {known.needs}{fetch}"


def _from_torchvision(known: ImageDataset, root: Path, download: bool, report: Report) -> tuple[Images, Images]:
    from torchvision import datasets  # type: ignore[import-untyped] # two seconds to import

    if download:
        report(f"{known.torchvision}: downloading up to {known.download}", 0, 1)
    opened = []
    for split in known.splits:
        try:
            opened.append(getattr(datasets, known.torchvision)(root, **split, download=download))
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigurationError(f"data.root={root}: {reason.rstrip('. ')}") from error
    train, evaluation = (_images(dataset, root, opened[0].classes) for dataset in opened)
    return train, evaluation


def _images(dataset: Any, root: Path, classes: Sequence[str]) -> Images:
    """Returns what torchvision lists; all files are decoded by `files.decode`, which names a broken image."""
    if hasattr(dataset, "data"):
        return ImageArray(torch.from_numpy(dataset.data).permute(0, 3, 1, 2), dataset.targets, classes)
    if hasattr(dataset, "_samples"):
        paths, labels = zip(*dataset._samples, strict=True)
    else:
        paths, labels = getattr(dataset, "_image_files", None) or dataset._images, dataset._labels
    return ImageFiles(root, [os.path.relpath(path, root) for path in paths], labels, classes)
