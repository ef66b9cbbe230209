"""Reads images in tar files without unpacking them: shards as WebDataset writes them.

An index of where each image lies is made once and kept in the cache, so that images are read in any order.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ...disk import cache_folder, open_regular, refuse_pointer
from ...errors import ConfigurationError
from ..cache import made, writing_cache
from ..source import Report, fingerprint_of
from ..tree import refuse_dead_links, visible_entries
from .files import ImageFiles
from .folders import numbered
from .layout import SUFFIXES, some_of

CLASS = ".cls"  # ending of the file that holds an image's label, a number from 0
KEYS = ("names", "places", "labels")  # of an index
BLOCK = 512  # bytes of a tar's header; one of zeros ends the tar


class ImagesInTars(ImageFiles):
    """Reads images that lie in tar files of one folder; for the rest see `ImageFiles`.

    Args:
        places: int64 [n, 3] of each image: number of the tar, first byte in it, bytes.
    """

    def __init__(
        self,
        tars: Sequence[Path],
        places: npt.NDArray[np.int64],
        names: Sequence[str],
        labels: Sequence[int],
        class_names: Sequence[str],
    ) -> None:
        super().__init__(tars[0].parent, names, labels, class_names)
        self._tars, self._places = tars, places

    def _file(self, index: int, name: str) -> tuple[Path, BinaryIO]:
        tar, first, size = self._places[index].tolist()
        with self._tars[tar].open("rb") as file:
            return self._tars[tar] / name, io.BytesIO(os.pread(file.fileno(), size, first))


def tars_of(root: Path, splits: Sequence[str]) -> list[list[Path]]:
    """Returns the tar files that hold each split: those in its folder if that has only tars, or those with its name.

    Raises:
        ConfigurationError: one has the names of two splits.
    """
    found = [_tars_of(root, split) for split in splits]
    if both := [path.name for path in found[0] if path in found[1]]:
        raise ConfigurationError(f"data.root={root}: {some_of(both)} may be of each of data.folders: rename it")
    return found


def _tars_of(root: Path, split: str) -> list[Path]:
    if (root / split).is_dir():
        files = [Path(entry) for entry in visible_entries(root / split)]
        unpacked = any(path.is_dir() or path.name.lower().endswith(SUFFIXES) for path in files)
        return [] if unpacked else [path for path in files if path.suffix == ".tar"]
    a_word = re.compile(rf"(?<![^\W_]){re.escape(split)}")  # val, as in images_validation.tar, not as in interval.tar
    named = [path for path in sorted(root.glob("*.tar")) if a_word.search(path.name) and path.name[0] != "."]
    refuse_dead_links(named)
    return named


def read_tars(tars: Sequence[Path], report: Report, known: Sequence[str] | None = None) -> ImagesInTars:
    """Returns the images of a split in tar files.

    Args:
        tars: its files.
        known: names of the classes, in the order of their numbers; None: the numbers up to the largest.

    Raises:
        ConfigurationError: a tar is damaged, or an image has no class or one that is not known; the message names it.
    """
    index = _kept_index(tars, report)
    names, places, labels = [os.fsdecode(name) for name in index["names"].tolist()], index["places"], index["labels"]
    if not names:
        raise ConfigurationError(f"{some_of([str(tar) for tar in tars])}: no image in it ({', '.join(SUFFIXES)})")
    in_folders = [f"{label}/{name}" for label, name in zip(labels.tolist(), names, strict=True)]
    classes = known or [str(number) for number in range(labels.max() + 1)]
    return ImagesInTars(tars, places, names, *numbered(in_folders, classes, tars[0].parent))


def _kept_index(tars: Sequence[Path], report: Report) -> dict[str, npt.NDArray[Any]]:
    """Returns the index of tar files from the cache; it is made again when a file's size or time has changed."""
    states = [(str(tar.resolve()), tar.stat().st_size, tar.stat().st_mtime_ns) for tar in tars]
    kept = cache_folder(None) / "tars" / f"{fingerprint_of(repr([states, SUFFIXES, CLASS]).encode())}.npz"

    def make(draft: Path) -> None:
        np.savez(draft, **_index(tars, report))

    with writing_cache(kept.parent):
        return made(kept, make, _read_index, report)


def _read_index(kept: Path) -> dict[str, npt.NDArray[Any]]:
    with os.fdopen(open_regular(kept), "rb") as file, np.load(file) as arrays:
        return {key: arrays[key] for key in KEYS}


def _index(tars: Sequence[Path], report: Report) -> dict[str, Any]:
    """Lists the images in some tar files.

    Returns:
        "names": bytes [n], of each image in its tar; "places": see `ImagesInTars`; "labels": int64 [n], from files
        beside the images.
    """
    names, places, labels = list[bytes](), list[tuple[int, int, int]](), list[int]()
    for number, tar in enumerate(tars):
        images, classes = dict[str, tuple[int, int]](), dict[str, int]()
        refuse_pointer(tar)
        with os.fdopen(open_regular(tar), "rb") as file:
            for name, first, size in _members(file, tar):
                if name.lower().endswith(SUFFIXES):
                    images[name] = (first, size)
                    if len(images) % 1000 == 1:
                        report(f"listing the images of {tar}", first, tar.stat().st_size)
                elif name.endswith(CLASS):
                    content = os.pread(file.fileno(), size, first).strip()
                    if not content.isdigit():
                        raise ConfigurationError(f"{tar / name}: {content[:20]!r} is not the number of a class")
                    classes[name.removesuffix(CLASS)] = int(content)
        report(f"listing the images of {tar}", 1, 1)
        stems = [_stem(name, classes) for name in images]
        found = Counter(stems)
        if odd := (found - Counter(classes.keys())) + (Counter(classes.keys()) - found):
            raise ConfigurationError(f"{tar} has not exactly one image for each {CLASS} file: {some_of(list(odd))}")
        names += [os.fsencode(name) for name in images]
        places += [(number, *place) for place in images.values()]
        labels += [classes[stem] for stem in stems]
    arrays = {"places": np.array(places, np.int64).reshape(-1, 3), "labels": np.array(labels, np.int64)}
    return {"names": np.array(names, np.bytes_), **arrays}


def _members(file: BinaryIO, path: Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, first byte and bytes of each file in a tar."""
    last = "its start"
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                last, name = member.name, member.name.removeprefix("./")
                if member.isdir() or name.rpartition("/")[2].startswith("."):
                    continue
                if not member.isfile():
                    raise ConfigurationError(f"{path / name} is a link: write the tar with --hard-dereference -h")
                yield name, member.offset_data, member.size
            file.seek(tar.offset)
            whole = file.read(BLOCK) == bytes(BLOCK)  # tarfile ends without a word at a header that it cannot read
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigurationError(f"{path} after {last}: {error}: it must be a whole tar, not packed") from error
    if not whole:
        raise ConfigurationError(f"{path} is cut off or damaged after {last}: load it again")


def _stem(name: str, labels: Collection[str]) -> str:
    """Returns the part of its name that an image shares with its label: a.b of a.b.jpg, or a if only that has one."""
    folder, slash, file = name.rpartition("/")
    parts = file.split(".")
    stems = [folder + slash + ".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
    return next((stem for stem in stems if stem in labels), stems[0])
