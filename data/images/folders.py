"""Lists image folders: one folder for each split, in it one for each class, with the images at any depth.

ImageNet has this form, and so has a user's own data set. Listing a million files on a network disk takes minutes, so
the list is kept in the cache until a folder changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...disk import write_whole
from ...errors import ConfigurationError
from ..source import Report
from .files import ImageFiles

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
JUST_CHANGED_SECONDS = 2.0  # a folder changed more recently may change again with the same time stamp


class Listing(NamedTuple):
    """Lists what is under a split's folder; paths are relative to it, with "/" between folders.

    Attributes:
        folders: every folder that was listed, also the split's own (".").
        changed: when each of them last changed, in nanoseconds.
        classes: the class folders, sorted.
        names: the images, class after class, sorted.
        labels: class number of each image.
        others: files in class folders that are no images.
    """

    folders: list[str]
    changed: list[int]
    classes: list[str]
    names: list[str]
    labels: list[int]
    others: list[str]


def read_folder(split: Path, cache: Path, report: Report) -> ImageFiles:
    """Returns the images of one split; warns of files of other kinds.

    Args:
        split: folder with a folder for each class.
        cache: folder of the lists of files.

    Raises:
        ConfigurationError: the folder, class folders or the images of a class are missing; the message says what was
            found.
    """
    _check_split(split)
    kept = cache / "image-lists" / f"{hashlib.blake2b(str(split.resolve()).encode(), digest_size=16).hexdigest()}.json"
    listing = _load(kept, split)
    if listing is None:
        listing = _scan(split, report)
        _keep(kept, listing)
    _check_classes(split, listing)
    others = listing.others
    if others:
        shown = f"{len(others):,} files in class folders are left out, being no images: {some_of(others)}"
        log.warning("%s: %s", split, shown)
    return ImageFiles(split, listing.names, listing.labels, listing.classes, len(others))


def _check_split(split: Path) -> None:
    root = split.parent
    if not root.is_dir():
        raise ConfigurationError(f"data.root={root}: there is no such folder")
    if not split.is_dir():
        raise ConfigurationError(f"data.root={root} has no folder '{split.name}', only {some_of(_names(root))}")


def _check_classes(split: Path, listing: Listing) -> None:
    if not listing.classes:
        raise ConfigurationError(
            f"{split} has no class folders, only {some_of(_names(split))}: sort its images into one folder a class"
        )
    filled = set(listing.labels)
    empty = [name for number, name in enumerate(listing.classes) if number not in filled]
    if empty:
        raise ConfigurationError(
            f"{split} has {len(empty)} class folders without an image ({', '.join(SUFFIXES)}): {some_of(empty)}"
        )


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def some_of(names: Sequence[str]) -> str:
    """Returns the first names, and how many there are, as text."""
    shown = ", ".join(sorted(names)[:4])
    return f"{shown}, … ({len(names)} in all)" if len(names) > 4 else shown or "nothing"


def _scan(split: Path, report: Report) -> Listing:
    listing = Listing(["."], [split.stat().st_mtime_ns], [], [], [], [])
    with os.scandir(split) as entries:
        listing.classes.extend(sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(".")))
    for number, name in enumerate(listing.classes):
        report(f"listing the images of {split}", number, len(listing.classes))
        first = len(listing.names)
        _scan_folder(split, name, listing)
        listing.labels.extend([number] * (len(listing.names) - first))
    report(f"listing the images of {split}", len(listing.classes), len(listing.classes))
    return listing


def _scan_folder(split: Path, folder: str, listing: Listing) -> None:
    listing.folders.append(folder)
    listing.changed.append((split / folder).stat().st_mtime_ns)
    with os.scandir(split / folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):  # such as ._n01440764_18.JPEG, which archivers on a Mac leave
                continue
            if entry.is_dir():
                _scan_folder(split, f"{folder}/{entry.name}", listing)
            elif entry.name.lower().endswith(SUFFIXES) and entry.is_file():  # a pipe would be waited for
                listing.names.append(f"{folder}/{entry.name}")
            else:
                listing.others.append(f"{folder}/{entry.name}")


def _load(kept: Path, split: Path) -> Listing | None:
    """Returns the list from the cache, or None if there is none or a folder has changed since."""
    try:
        listing = Listing(**json.loads(kept.read_text(encoding="ascii")))
        changed = [(split / folder).stat().st_mtime_ns for folder in listing.folders]
    except (OSError, ValueError, TypeError):  # missing, torn or in another format
        return None
    return listing if changed == listing.changed else None


def _keep(kept: Path, listing: Listing) -> None:
    """Writes the list, whole or not at all. A cache that cannot be written is no error: the next run scans again."""
    if time.time() - max(listing.changed) / 1e9 < JUST_CHANGED_SECONDS:
        return
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, json.dumps(listing._asdict()))
