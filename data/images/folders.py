"""Lists image folders: one folder for each split, in it one for each class, with the images at any depth.

ImageNet has this form, and so has a user's own data set.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import ConfigurationError
from ..source import Report
from ..tree import by_ending, files_below, refuse_dead_links, visible_entries
from .files import ImageFiles
from .layout import SUFFIXES, folders_in, has_suffix, some_of

log = logging.getLogger(__name__)


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
        found = some_of([path.name for path in split.parent.glob("*")])
        raise ConfigurationError(f"data.root={split.parent} has no folder '{split.name}', only {found}")
    classes = in_order(entry.name for entry in visible_entries(split) if entry.is_dir())
    if not classes:
        found = some_of([path.name for path in split.iterdir()])
        raise ConfigurationError(f"{split} has no class folders, only {found}: sort its images into one folder a class")
    names, others = list[str](), list[str]()
    for done, name in enumerate(classes):
        report(f"listing the images of {split}", done, len(classes))
        images, strangers = images_in(split, name)
        if not images:
            raise ConfigurationError(f"{split} has class folders without an image ({', '.join(SUFFIXES)}): {name} …")
        names += images
        others += strangers
    report(f"listing the images of {split}", len(classes), len(classes))
    if known is None and len(classes) == 1:
        _warn_of_one_class(split / classes[0])
    if others:
        counts = by_ending(others)
        log.warning("%s: %d files are left out, no images (%s): %s", split, len(others), counts, some_of(others))
    return ImageFiles(split, names, *numbered(names, known or classes, split))


def _warn_of_one_class(folder: Path) -> None:
    below = [path.name for path in folders_in(folder)]
    meant = f"; its folders {some_of(below)} may be the classes: choose by data.root, data.folders" if below else ""
    log.warning("%s: all images are of one class, '%s'%s", folder.parent, folder.name, meant)


def numbered(names: Sequence[str], classes: Sequence[str], place: Path) -> tuple[list[int], list[str]]:
    """Returns the number of each image's class, which is the first part of its name, and the classes.

    Args:
        classes: names of the classes in the order of their numbers.
        place: folder of the images; for messages.

    Raises:
        ConfigurationError: an image is of another class.
    """
    number, labels = {name: label for label, name in enumerate(classes)}, list[int]()
    for name in names:
        of = name.partition("/")[0]
        if of not in number:
            raise ConfigurationError(f"{place / name} is of class '{of}', which the training images have not")
        labels.append(number[of])
    return labels, list(classes)


def in_order(classes: Iterable[str]) -> list[str]:
    """Returns names of classes in the order of their labels: numbers by their size, so that 10 comes after 2."""
    names = sorted(classes)
    return sorted(names, key=int) if all(re.fullmatch("[0-9]+", name) for name in names) else names


def images_in(split: Path, name: str) -> tuple[list[str], list[str]]:
    """Returns the paths from `split` of the images in and below one of its folders, and those of other files."""
    begin = len(f"{split}/")
    files = [(of.path, has_suffix(of.name) and of.is_file()) for of in files_below(split / name, has_suffix)]
    return [path[begin:] for path, image in files if image], [path[begin:] for path, image in files if not image]
