"""Opens the paper's image data sets (section 4) on disk."""

import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import ConfigurationError
from ..source import Report
from .files import ImageArray, ImageFiles, Images
from .folders import read_folder
from .layout import split_root, unsplit
from .tars import read_tars, tars_of

Splits = tuple[Mapping[str, Any], Mapping[str, Any]]  # arguments for training and evaluation
CIFAR: Splits = {"train": True}, {"train": False}
TRAIN: Splits = {"split": "train"}, {"split": "test"}
TRAINVAL: Splits = {"split": "trainval"}, {"split": "test"}
TORCHVISION = {  # the class in torchvision.datasets that lists the files of a data set
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
) -> tuple[Images, Images]:
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
        return _on_disk(split_root(place, folders[0]), folders, report)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}. docs/images.md says what belongs there and where it is from") from error


def _on_disk(root: Path, folders: Sequence[str], report: Report) -> tuple[Images, Images]:
    """Returns the images of both splits, in class folders or in tars."""

    def read(folder: str, tars: Sequence[Path], known: Sequence[str] | None = None) -> Images:
        return read_tars(tars, report, known) if tars else read_folder(root / folder, report, known)

    train_tars, evaluation_tars = tars_of(root, folders)
    if not train_tars and (line := unsplit(root, folders)):
        raise ConfigurationError(line)
    train = read(folders[0], train_tars)
    return train, read(folders[1], evaluation_tars, train.class_names)


def _held_out(root: Path, folders: Sequence[str], share: float, report: Report) -> tuple[Images, Images]:
    """Returns class folders in two parts; an image's part follows from its content, whatever its name or neighbours.

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


def _from_torchvision(kind: str, splits: Splits, root: Path) -> tuple[Images, Images]:
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


def _images(dataset: Any, root: Path, classes: Sequence[str]) -> Images:
    """Returns torchvision's list of images; all files are decoded by `files.decode`, which names a broken image."""
    if hasattr(dataset, "data"):
        return ImageArray(torch.from_numpy(dataset.data).permute(0, 3, 1, 2), dataset.targets, classes)
    if hasattr(dataset, "_samples"):
        paths, labels = zip(*dataset._samples, strict=True)
    else:
        paths, labels = getattr(dataset, "_image_files", None) or dataset._images, dataset._labels
    return ImageFiles(root, [os.path.relpath(path, root) for path in paths], labels, classes)
