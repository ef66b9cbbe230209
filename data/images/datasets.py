"""Opens the paper's image data sets (section 4) on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ...errors import ConfigurationError
from ..source import Report
from . import imagenet
from .files import ImageArray, ImageFiles, Images
from .folders import is_flat, read_flat, read_folder
from .tars import read_tars, tars_of


class Downloaded(NamedTuple):
    """Describes a data set whose files torchvision lists.

    Attributes:
        kind: its class in torchvision.datasets.
        splits: that class's arguments for training and evaluation.
        size: of what `data.download=true` fetches; empty if a program cannot fetch it.
    """

    kind: str
    splits: tuple[Mapping[str, Any], Mapping[str, Any]]
    size: str = ""


CIFAR = ({"train": True}, {"train": False})
TRAIN, TRAINVAL = ({"split": "train"}, {"split": "test"}), ({"split": "trainval"}, {"split": "test"})
TORCHVISION = {
    "cifar10": Downloaded("CIFAR10", CIFAR, "170 MB"),
    "cifar100": Downloaded("CIFAR100", CIFAR, "170 MB"),
    "stanford_cars": Downloaded("StanfordCars", TRAIN),
    "oxford_pets": Downloaded("OxfordIIITPet", TRAINVAL, "800 MB"),
    "food101": Downloaded("Food101", TRAIN, "5 GB"),
    "fgvc_aircraft": Downloaded("FGVCAircraft", TRAINVAL, "2.8 GB"),
}


Name = Literal[
    "image_folder", "imagenet", "cifar10", "cifar100", "stanford_cars", "oxford_pets", "food101", "fgvc_aircraft"
]


def open_images(
    dataset: str, root: str | None, folders: Sequence[str], download: bool, report: Report
) -> tuple[Images, Images]:
    """Returns the training and the evaluation images of a data set.

    Args:
        dataset: "image_folder", "imagenet" or a key of `TORCHVISION`.
        root: the folder that holds it.
        folders: the two splits of an image folder.
        download: whether torchvision may fetch what is missing.

    Raises:
        ConfigurationError: something is missing; the message says what was looked for.
    """
    known = TORCHVISION.get(dataset)
    size = known.size if known is not None else ""
    try:
        if root is None:
            raise ConfigurationError("data.root is not set")
        if download and not size:
            raise ConfigurationError(f"data.download=true: {dataset} cannot be downloaded by program")
        place = Path(root).expanduser()
        if known is not None:
            return _from_torchvision(known, place, download, report)
        return _on_disk(place, folders, dataset == "imagenet", report)
    except ConfigurationError as error:
        fetch = f", or data.download=true fetches it ({size})" if size else ""
        raise ConfigurationError(
            f"{error}. docs/images.md says what belongs there and where it is from{fetch}"
        ) from error


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


def _from_torchvision(known: Downloaded, root: Path, download: bool, report: Report) -> tuple[Images, Images]:
    from torchvision import datasets  # type: ignore[import-untyped] # two seconds to import

    if download:
        report(f"{known.kind}: downloading up to {known.size}", 0, 1)
    opened = []
    for split in known.splits:
        try:
            opened.append(getattr(datasets, known.kind)(root, **split, download=download))
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigurationError(f"data.root={root}: {reason.rstrip('. ')}") from error
    train, evaluation = (_images(dataset, root, opened[0].classes) for dataset in opened)
    return train, evaluation


def _images(dataset: Any, root: Path, classes: Sequence[str]) -> Images:
    """Returns torchvision's list of images; all files are decoded by `files.decode`, which names a broken image."""
    if hasattr(dataset, "data"):
        return ImageArray(torch.from_numpy(dataset.data).permute(0, 3, 1, 2), dataset.targets, classes)
    if hasattr(dataset, "_samples"):
        paths, labels = zip(*dataset._samples, strict=True)
    else:
        paths, labels = getattr(dataset, "_image_files", None) or dataset._images, dataset._labels
    return ImageFiles(root, [os.path.relpath(path, root) for path in paths], labels, classes)
