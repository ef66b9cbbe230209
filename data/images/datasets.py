"""Opens image data sets on disk: image folders, shards, and those of the paper's section 4 that torchvision lists.

An image folder has one folder for each split, in it one for each class, with the images at any depth: ImageNet's form.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import ConfigurationError
from ..source import Report
from ..tree import files_below, in_short, refuse_dead_links, visible_entries
from .files import ImageArray, ImageFiles
from .layout import SUFFIXES, folders_in, has_suffix, split_root
from .tars import read_tars, tars_of

log = logging.getLogger(__name__)

Splits = tuple[Mapping[str, Any], Mapping[str, Any]]  # arguments for training and evaluation
CIFAR: Splits = {"train": True}, {"train": False}
TRAIN: Splits = {"split": "train"}, {"split": "test"}
TRAINVAL: Splits = {"split": "trainval"}, {"split": "test"}
TORCHVISION = {  # data set -> class in torchvision.datasets that lists its files, arguments of its splits
    "cifar10": ("CIFAR10", CIFAR),
    "cifar100": ("CIFAR100", CIFAR),
    "stanford_cars": ("StanfordCars", TRAIN),
    "oxford_pets": ("OxfordIIITPet", TRAINVAL),
    "food101": ("Food101", TRAIN),
    "fgvc_aircraft": ("FGVCAircraft", TRAINVAL),
}
HASHED = 1 << 16  # bytes of a file, beside its size, by which its image is held out or not
Name = Literal[
    "image_folder", "imagenet", "cifar10", "cifar100", "stanford_cars", "oxford_pets", "food101", "fgvc_aircraft"
]


def open_images(
    dataset: str, root: str | None, folders: Sequence[str], held_out: float | None, report: Report
) -> tuple[ImageFiles, ImageFiles]:
    """Returns the training and the evaluation images of a data set.

    Args:
        dataset: "image_folder", "imagenet" or a key of `TORCHVISION`.
        root: the folder that holds it.
        folders: the two splits of an image folder.
        held_out: share of the training images that is evaluated on instead of a second split; None: there are two.

    Raises:
        ConfigurationError: something is missing; the message says what was looked for.
    """
    try:
        if root is None:
            raise ConfigurationError("data.root is not set")
        place = Path(root).expanduser()
        if dataset in TORCHVISION:
            return _from_torchvision(*TORCHVISION[dataset], place)
        if held_out is not None:
            return _held_out(split_root(place, folders[0]), folders, held_out, report)
        place = split_root(place, folders[0])
        train = _read_split(place, folders[0], report)
        return train, _read_split(place, folders[1], report, train.class_names)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}. docs/images.md says what belongs there and where it is from") from error


def _read_split(root: Path, folder: str, report: Report, known: Sequence[str] | None = None) -> ImageFiles:
    """Returns the images of a split, in class folders or in tars; ``known``: see `read_folder`."""
    tars = tars_of(root, folder)
    return read_tars(tars, report, known) if tars else read_folder(root / folder, report, known)


def _held_out(root: Path, folders: Sequence[str], share: float, report: Report) -> tuple[ImageFiles, ImageFiles]:
    """Divides the images of class folders into training and evaluation, by a hash of each image's content.

    Raises:
        ConfigurationError: there is an evaluation folder too, or one part would be empty.
    """
    if (root / folders[1]).is_dir():
        raise ConfigurationError(f"data.held_out={share}, but {root} has a folder '{folders[1]}': data.held_out=null")
    every = read_folder(root / folders[0] if (root / folders[0]).is_dir() else root, report)
    held = []
    for number, path in enumerate(every.paths()):
        if number % 1000 == 0:
            report("choosing the images that are held out", number, len(every))
        with path.open("rb") as file:
            digest = blake2b(file.read(HASHED) + str(path.stat().st_size).encode(), digest_size=8).digest()
        held.append(int.from_bytes(digest, "little") < share * 2**64)
    report("choosing the images that are held out", len(every), len(every))
    if all(held) or not any(held):
        raise ConfigurationError(f"data.held_out={share} holds out {sum(held)} of {len(held)} images: change it")
    return every.only([not out for out in held]), every.only(held)


def _from_torchvision(kind: str, splits: Splits, root: Path) -> tuple[ImageFiles, ImageFiles]:
    """Returns the training and the evaluation images of a torchvision data set, in the class named `kind`."""
    from torchvision import datasets  # type: ignore[import-untyped] # two seconds to import

    opened = []
    for split in splits:
        try:
            opened.append(getattr(datasets, kind)(root, **split))
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigurationError(f"data.root={root}: {reason.rstrip('. ')}") from error
    train, evaluation = (_images(dataset, root, opened[0].classes) for dataset in opened)
    return train, evaluation


def _images(dataset: Any, root: Path, classes: Sequence[str]) -> ImageFiles:
    """Returns the images of a torchvision data set, read by `ImageFiles`, which names a broken image."""
    if hasattr(dataset, "data"):
        return ImageArray(torch.from_numpy(dataset.data).permute(0, 3, 1, 2), dataset.targets, classes)
    if hasattr(dataset, "_samples"):
        paths, labels = zip(*dataset._samples, strict=True)
    else:
        paths, labels = getattr(dataset, "_image_files", None) or dataset._images, dataset._labels
    return ImageFiles(root, [os.path.relpath(path, root) for path in paths], labels, classes)


# -- folders -----------------------------------------------------------------------------------------------------------


def read_folder(split: Path, report: Report, known: Sequence[str] | None = None) -> ImageFiles:
    """Returns the images of one split; warns of files of other kinds.

    Args:
        split: folder with a folder for each class.
        known: names of the classes, in the order of their numbers; None: those of the folders.

    Raises:
        ConfigurationError: the folder, class folders or the images of a class are missing, or a class is not known;
            the message says what was found.
    """
    refuse_dead_links([split])
    if not split.is_dir():
        there = in_short(sorted(path.name for path in split.parent.glob("*")))
        raise ConfigurationError(f"data.root={split.parent} has no folder '{split.name}', only {there}")
    classes = in_order(entry.name for entry in visible_entries(split) if entry.is_dir())
    if not classes:
        there = in_short(sorted(path.name for path in split.iterdir()))
        raise ConfigurationError(f"{split} has no class folders, only {there}: sort its images into one folder a class")
    numbers = {name: label for label, name in enumerate(known or classes)}
    names, labels, others, begin = list[str](), list[int](), list[str](), len(f"{split}/")
    for done, name in enumerate(classes):
        report(f"listing the images of {split}", done, len(classes))
        found = [entry.path[begin:] for entry in files_below(split / name, has_suffix)]
        images = [path for path in found if has_suffix(path)]
        if not images:
            raise ConfigurationError(f"{split} has class folders without an image ({', '.join(SUFFIXES)}): {name} …")
        if name not in numbers:
            raise ConfigurationError(f"{split / images[0]} is of class '{name}', which the training images have not")
        names += images
        labels += [numbers[name]] * len(images)
        others += [path for path in found if not has_suffix(path)]
    report(f"listing the images of {split}", len(classes), len(classes))
    if known is None and len(classes) == 1:
        below = in_short([path.name for path in folders_in(split / classes[0])])
        told = "%s: all images are of one class, '%s'; the folders in it (%s) may be the classes: see data.root"
        log.warning(told, split, classes[0], below)
    if others:
        log.warning("%s: %d files are left out, no images: %s", split, len(others), in_short(others))
    return ImageFiles(split, names, labels, [*numbers])


def in_order(classes: Iterable[str]) -> list[str]:
    """Returns names of classes in the order of their labels: numbers by their size, so that 10 comes after 2."""
    names = sorted(classes)
    return sorted(names, key=int) if all(re.fullmatch("[0-9]+", name) for name in names) else names
