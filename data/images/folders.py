"""Lists image folders: one folder for each split, in it one for each class, with the images at any depth.

ImageNet has this form, and so has a user's own data set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import ConfigurationError
from ..source import Report
from .files import ImageFiles

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")


def read_folder(split: Path, report: Report, known: Sequence[str] | None = None) -> ImageFiles:
    """Returns the images of one split; warns of files of other kinds.

    Args:
        split: folder with a folder for each class.
        known: names of the classes, in the order of their numbers; None: those of the folders.

    Raises:
        ConfigurationError: the folder, class folders or the images of a class are missing, or a class is not known;
            the message says what was found.
    """
    root = split.parent
    if not root.is_dir():
        raise ConfigurationError(f"data.root={root}: there is no such folder")
    if not split.is_dir():
        found = _some_of([path.name for path in root.iterdir()])
        raise ConfigurationError(f"data.root={root} has no folder '{split.name}', only {found}")
    classes = sorted(path.name for path in split.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        found = _some_of([path.name for path in split.iterdir()])
        raise ConfigurationError(f"{split} has no class folders, only {found}: sort its images into one folder a class")
    number = {name: label for label, name in enumerate(classes if known is None else known)}
    if strange := [name for name in classes if name not in number]:
        raise ConfigurationError(f"{split} has class folders that the training folder has not: {_some_of(strange)}")
    names, labels, others, empty = list[str](), list[int](), list[str](), list[str]()
    begin = len(f"{split}/")
    for done, name in enumerate(classes):
        report(f"listing the images of {split}", done, len(classes))
        files = list(_files(split / name))
        images = [path[begin:] for path, is_image in files if is_image]
        others += [path[begin:] for path, is_image in files if not is_image]
        empty += [] if images else [name]
        names += images
        labels += [number[name]] * len(images)
    report(f"listing the images of {split}", len(classes), len(classes))
    if empty:
        kinds = ", ".join(SUFFIXES)
        raise ConfigurationError(
            f"{split} has {len(empty)} class folders without an image ({kinds}): {_some_of(empty)}"
        )
    if others:
        shown = f"{len(others):,} files in class folders are left out, being no images: {_some_of(others)}"
        log.warning("%s: %s", split, shown)
    return ImageFiles(split, names, labels, list(number), len(others))


def _some_of(names: Sequence[str]) -> str:
    """Returns the first names, and how many there are, as text."""
    shown = ", ".join(sorted(names)[:4])
    return f"{shown}, … ({len(names)} in all)" if len(names) > 4 else shown or "nothing"


def _files(folder: str | Path) -> Iterator[tuple[str, bool]]:
    """Yields the path of each file in and below a folder, sorted, and whether it is an image."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):  # such as ._n01440764_18.JPEG, which archivers on a Mac leave
            continue
        if entry.is_dir():
            yield from _files(entry.path)
        else:
            yield entry.path, entry.name.lower().endswith(SUFFIXES) and entry.is_file()  # a pipe would be waited for
