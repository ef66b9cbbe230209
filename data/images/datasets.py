"""Opens the paper's image data sets (section 4) on disk, and explains what is missing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import ConfigurationError
from ..source import Report
from .files import ImageArray, ImageFiles, Images
from .folders import read_folder, some_of


@dataclass(frozen=True)
class ImageDataset:
    """Describes a data set.

    Attributes:
        title: its name in messages.
        layout: what `data.root` must hold.
        origin: where to get it.
        torchvision: the class of torchvision.datasets that lists its files; None for an image folder.
        train, evaluation: that class's arguments for the two splits.
        download: size of what `data.download=true` fetches; None if a program cannot fetch it.
    """

    title: str
    layout: str
    origin: str
    torchvision: str | None = None
    train: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    download: str | None = None


DATASETS = {
    "image_folder": ImageDataset(
        title="an image folder",
        layout="a folder for each of data.folders, in each of them a folder of images for each class",
        origin="arrange your images so",
    ),
    "imagenet": ImageDataset(
        title="ImageNet",
        layout="train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, 1,000 folders n01440764 … n15075141 in each",
        origin="ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar from https://image-net.org/download-images "
        "(an account is needed); unpack the 1,000 tar files of train, and sort val into class folders",
    ),
    "cifar10": ImageDataset(
        title="CIFAR-10",
        layout="cifar-10-batches-py/ with data_batch_1 … data_batch_5, test_batch and batches.meta, as published",
        origin="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        torchvision="CIFAR10", train={"train": True}, evaluation={"train": False}, download="170 MB",
    ),
    "cifar100": ImageDataset(
        title="CIFAR-100",
        layout="cifar-100-python/ with train, test and meta, as published",
        origin="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        torchvision="CIFAR100", train={"train": True}, evaluation={"train": False}, download="170 MB",
    ),
    "stanford_cars": ImageDataset(
        title="Stanford Cars",
        layout="stanford_cars/ with cars_train/*.jpg, cars_test/*.jpg, devkit/cars_meta.mat, "
        "devkit/cars_train_annos.mat and cars_test_annos_withlabels.mat",
        origin="its own site is gone: look for cars_train.tgz, cars_test.tgz, car_devkit.tgz and "
        "cars_test_annos_withlabels.mat at https://github.com/pytorch/vision/issues/7545",
        torchvision="StanfordCars", train={"split": "train"}, evaluation={"split": "test"},
    ),
    "oxford_pets": ImageDataset(
        title="Oxford-IIIT Pets",
        layout="oxford-iiit-pet/ with images/*.jpg, annotations/trainval.txt and annotations/test.txt",
        origin="https://www.robots.ox.ac.uk/~vgg/data/pets/ (images.tar.gz and annotations.tar.gz)",
        torchvision="OxfordIIITPet", train={"split": "trainval"}, evaluation={"split": "test"}, download="800 MB",
    ),
    "food101": ImageDataset(
        title="Food-101",
        layout="food-101/ with images/<class>/*.jpg, meta/train.json and meta/test.json",
        origin="http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
        torchvision="Food101", train={"split": "train"}, evaluation={"split": "test"}, download="5 GB",
    ),
    "fgvc_aircraft": ImageDataset(
        title="FGVC Aircraft",
        layout="fgvc-aircraft-2013b/data/ with images/*.jpg, variants.txt, images_variant_trainval.txt and "
        "images_variant_test.txt",
        origin="https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
        torchvision="FGVCAircraft", train={"split": "trainval"}, evaluation={"split": "test"}, download="2.8 GB",
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
        if download and known.download is None:
            raise ConfigurationError(f"data.download=true: {known.title} cannot be downloaded by program")
        if known.torchvision is None:
            train, evaluation = (read_folder(Path(root).expanduser() / folder, report) for folder in folders)
            return train, _relabelled(evaluation, train)
        return _from_torchvision(known, Path(root).expanduser(), download, report)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}. {help_for(dataset)}") from error


def help_for(dataset: str) -> str:
    """Returns what `data.root` must hold and where to get it."""
    known = DATASETS[dataset]
    fetch = f"; or data.download=true ({known.download})" if known.download else ""
    return f"For {known.title}, data.root must hold {known.layout}. Where from: {known.origin}{fetch}"


def _relabelled(evaluation: ImageFiles, train: ImageFiles) -> ImageFiles:
    """Returns the evaluation images with the training split's class numbers."""
    number = {name: label for label, name in enumerate(train.class_names)}
    strange = [name for name in evaluation.class_names if name not in number]
    if strange:
        raise ConfigurationError(f"{evaluation.root} has class folders that {train.root} has not: {some_of(strange)}")
    labels = np.array([number[name] for name in evaluation.class_names])[evaluation.labels]
    return evaluation.relabelled(labels, train.class_names)


def _from_torchvision(known: ImageDataset, root: Path, download: bool, report: Report) -> tuple[Images, Images]:
    from torchvision import datasets  # type: ignore[import-untyped] # two seconds to import

    if download:
        report(f"{known.title}: downloading up to {known.download}", 0, 1)
    opened = []
    for split in (known.train, known.evaluation):
        try:
            opened.append(getattr(datasets, str(known.torchvision))(root, **split, download=download))
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].replace(DOWNLOAD_ADVICE, "")
            raise ConfigurationError(f"data.root={root}: {reason.rstrip('. ')}") from error
    classes = opened[0].classes
    train, evaluation = (_images(dataset, root, classes) for dataset in opened)
    return train, evaluation


DOWNLOAD_ADVICE = "You can use download=True to download it"  # torchvision's words; ours name the key


def _images(dataset: Any, root: Path, classes: Sequence[str]) -> Images:
    """Returns what torchvision lists; all files are decoded by `files.decode`, which names a broken image."""
    if hasattr(dataset, "data"):
        return ImageArray(torch.from_numpy(dataset.data).permute(0, 3, 1, 2), dataset.targets, classes)
    if hasattr(dataset, "_samples"):
        paths, labels = zip(*dataset._samples, strict=True)
    else:
        paths, labels = getattr(dataset, "_image_files", None) or dataset._images, dataset._labels
    return ImageFiles(root, [os.path.relpath(path, root) for path in paths], labels, classes)
