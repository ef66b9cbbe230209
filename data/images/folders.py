"""Lists image folders: one folder for each split, in it one for each class, with the images at any depth.

ImageNet has this form, and so has a user's own data set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigurationError
from ..source import Report
from .files import ImageFiles

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")


def read_folder(split: Path, report: Report) -> ImageFiles:
    """Returns the images of one split; warns of files of other kinds.

    Args:
        split: folder with a folder for each class.

    Raises:
        ConfigurationError: the folder, class folders or the images of a class are missing; the message says what was
            found.
    """
    root = split.parent
    if not root.is_dir():
        raise ConfigurationError(f"data.root={root}: there is no such folder")
    if not split.is_dir():
        raise ConfigurationError(f"data.root={root} has no folder '{split.name}', only {some_of(_names(root))}")
    classes = sorted(path.name for path in split.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise ConfigurationError(
            f"{split} has no class folders, only {some_of(_names(split))}: sort its images into one folder a class"
        )
    names, labels, others, empty = list[str](), list[int](), list[str](), list[str]()
    for number, name in enumerate(classes):
        report(f"listing the images of {split}", number, len(classes))
        of_class = len(names)
        _list(split, name, names, others)
        labels += [number] * (len(names) - of_class)
        empty += [name] * (len(names) == of_class)
    report(f"listing the images of {split}", len(classes), len(classes))
    if empty:
        kinds = ", ".join(SUFFIXES)
        raise ConfigurationError(f"{split} has {len(empty)} class folders without an image ({kinds}): {some_of(empty)}")
    if others:
        shown = f"{len(others):,} files in class folders are left out, being no images: {some_of(others)}"
        log.warning("%s: %s", split, shown)
    return ImageFiles(split, names, labels, classes, len(others))


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def some_of(names: Sequence[str]) -> str:
    """Returns the first names, and how many there are, as text."""
    shown = ", ".join(sorted(names)[:4])
    return f"{shown}, … ({len(names)} in all)" if len(names) > 4 else shown or "nothing"


def _list(split: Path, folder: str, names: list[str], others: list[str]) -> None:
    """Adds the images and the other files of a folder, sorted; paths begin at `split`."""
    with os.scandir(split / folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):  # such as ._n01440764_18.JPEG, which archivers on a Mac leave
                continue
            path = f"{folder}/{entry.name}"
            if entry.is_dir():
                _list(split, path, names, others)
            elif entry.name.lower().endswith(SUFFIXES) and entry.is_file():  # a pipe would be waited for
                names.append(path)
            else:
                others.append(path)
