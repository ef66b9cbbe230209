"""Reads images in tar files without unpacking them: shards as WebDataset writes them.

An index of where each image lies is made once and kept in the cache, so that images are read in any order.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ...disk import cache_folder, refuse_pointer
from ...errors import ConfigurationError
from ..cache import get_or_make, writing_cache
from ..source import Report, fingerprint_of
from ..tree import in_short, refuse_dead_links, visible_entries
from .files import ImageFiles
from .layout import SUFFIXES

CLASS = ".cls"  # ending of the file that holds an image's label, a number from 0

Index = npt.NDArray[Any]
"""A row for each image: "name" in bytes, "label", number of its "tar", "first" byte there, "size" in bytes."""


class ImagesInTars(ImageFiles):
    """Reads images that lie in tar files of one folder; for the rest see `ImageFiles`."""

    def __init__(self, tars: Sequence[Path], index: Index, known: Sequence[str] | None) -> None:
        names = [os.fsdecode(name) for name in index["name"].tolist()]
        labels = index["label"].tolist()
        classes = known or [str(number) for number in range(max(labels) + 1)]
        for name, label in zip(names, labels, strict=True):
            if label >= len(classes):
                raise ConfigurationError(f"{name} is of class '{label}', which the training images have not")
        super().__init__(tars[0].parent, names, labels, classes)
        self._tars, self._places = tars, index[["tar", "first", "size"]]

    def _file(self, index: int, name: str) -> tuple[Path, BinaryIO]:
        tar, first, size = self._places[index].tolist()
        with self._tars[tar].open("rb") as file:
            return self._tars[tar] / name, io.BytesIO(os.pread(file.fileno(), size, first))


def tars_of(root: Path, split: str) -> list[Path]:
    """Returns the tar files that hold a split: those in its folder if that has only tars, or those with its name."""
    if (root / split).is_dir():
        files = [Path(entry) for entry in visible_entries(root / split)]
        unpacked = any(path.is_dir() or path.name.lower().endswith(SUFFIXES) for path in files)
        return [] if unpacked else [path for path in files if path.suffix == ".tar"]
    a_word = re.compile(rf"(?<![^\W_]){re.escape(split)}")  # val, as in images_validation.tar, not as in interval.tar
    named = [path for path in sorted(root.glob("*.tar")) if a_word.search(path.name) and path.name[0] != "."]
    refuse_dead_links(named)
    return named


def read_tars(tars: Sequence[Path], report: Report, known: Sequence[str] | None = None) -> ImagesInTars:
    """Returns the images of a split in tar files. Their index is made anew if a file's size or time has changed.

    Args:
        tars: the split's files.
        known: names of the classes, in the order of their numbers; None: the numbers up to the largest.

    Raises:
        ConfigurationError: a tar is damaged, or an image has no class or one that is not known; the message names it.
    """
    states = [(str(tar.resolve()), tar.stat().st_size, tar.stat().st_mtime_ns) for tar in tars]
    kept = cache_folder(None) / "tars" / f"{fingerprint_of(repr([states, SUFFIXES, CLASS]).encode())}.npy"
    with writing_cache(kept.parent):
        index = get_or_make(kept, lambda draft: np.save(draft, _index(tars, report)), np.load, report)
    if not len(index):
        raise ConfigurationError(f"{in_short([str(tar) for tar in tars])}: no image in it ({', '.join(SUFFIXES)})")
    return ImagesInTars(tars, index, known)


def _index(tars: Sequence[Path], report: Report) -> Index:
    """Lists the images in tar files, with their labels and places."""
    rows = list[tuple[bytes, int, int, int, int]]()
    for number, tar in enumerate(tars):
        report(f"listing the images of {tar}", number, len(tars))
        refuse_pointer(tar)
        images, classes = dict[str, tarfile.TarInfo](), dict[str, int]()
        with tar.open("rb") as file:
            for member in _members(file, tar):
                stem = str(Path(member.name).with_suffix(""))
                if member.name.lower().endswith(SUFFIXES):
                    images[stem] = member
                elif member.name.endswith(CLASS):
                    content = os.pread(file.fileno(), member.size, member.offset_data).strip()
                    if not content.isdigit():
                        raise ConfigurationError(f"{tar}: {member.name} holds {content[:20]!r}, no number of a class")
                    classes[stem] = int(content)
        if odd := images.keys() ^ classes.keys():
            raise ConfigurationError(f"{tar} has not exactly one image for each {CLASS} file: {in_short(sorted(odd))}")
        for stem, member in images.items():
            rows.append((os.fsencode(Path(member.name)), classes[stem], number, member.offset_data, member.size))
    report(f"listing the images of {tars[-1]}", len(tars), len(tars))
    longest = max((len(name) for name, *_ in rows), default=1)
    numbers = [(name, np.int64) for name in ("label", "tar", "first", "size")]
    return np.array(rows, [("name", f"S{longest}"), *numbers])


def _members(file: BinaryIO, path: Path) -> list[tarfile.TarInfo]:
    """Returns the visible files in a tar."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            members = tar.getmembers()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigurationError(f"{path}: {error}: it must be a whole tar, not packed") from error
    return [member for member in members if member.isfile() and not Path(member.name).name.startswith(".")]
