"""Reads images in tar files without unpacking them: the tars of ImageNet, and shards as WebDataset writes them.

An index of where each image lies is made once and kept in the cache, so that images are read in any order.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ...disk import writing
from ...errors import ConfigurationError
from ..cache import cache_folder, made
from ..source import Report, fingerprint_of
from .files import ImageFiles
from .folders import SUFFIXES, some_of

NEEDS = "shards of WebDataset, <folder>/*.tar or *<folder>*.tar, with each image (KEY.jpg) beside its label (KEY.cls)"
CLASS = ".cls"  # ending of the file that holds an image's label, a number from 0
IN_TAR = ".tar/"  # in a name: between a tar in a tar, which has the images of one class, and its image
BLOCK = 512  # bytes of a tar's header; one of zeros ends the tar

FoldersOf = Callable[[Sequence[str]], Sequence[str]]


class TarIndex(NamedTuple):
    """Lists the images in some tar files.

    Attributes:
        names: bytes [n], of each image in its tar.
        places: int64 [n, 3]: number of the tar, first byte in it, bytes.
        labels: int64 [n], from files beside them; empty if there are none.
    """

    names: npt.NDArray[Any]
    places: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


class ImagesInTars(ImageFiles):
    """Reads images that lie in tar files as `index` says; for the rest see `ImageFiles`."""

    def __init__(
        self, tars: Sequence[Path], index: TarIndex, names: Sequence[str], labels: Sequence[int], classes: Sequence[str]
    ) -> None:
        super().__init__(tars[0].parent, names, labels, classes)
        self._tars, self._index = tars, index

    def _path(self, index: int) -> Path:
        return self._tars[int(self._index.places[index, 0])] / os.fsdecode(self._index.names[index])

    def _file(self, index: int) -> BinaryIO:
        tar, first, size = self._index.places[index].tolist()
        with self._tars[tar].open("rb") as file:
            return io.BytesIO(os.pread(file.fileno(), size, first))


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
        files = sorted(path for path in (root / split).iterdir() if not path.name.startswith("."))
        unpacked = any(path.is_dir() or path.name.lower().endswith(SUFFIXES) for path in files)
        return [] if unpacked else [path for path in files if path.suffix == ".tar"]
    imagenet = root / f"ILSVRC2012_img_{split}.tar"  # may lie beside others, as ILSVRC2012_img_train_t3.tar
    a_word = re.compile(rf"(?<![^\W_]){re.escape(split)}")  # val, as in images_validation.tar, not as in interval.tar
    named = [path for path in sorted(root.glob("*.tar")) if a_word.search(path.name) and path.name[0] != "."]
    return [imagenet] if imagenet in named else named


def read_tars(
    tars: Sequence[Path], report: Report, known: Sequence[str] | None = None, folders_of: FoldersOf | None = None
) -> ImagesInTars:
    """Returns the images of a split in tar files; those of ImageNet in the order of class folders.

    Args:
        tars: its files.
        known: names of the classes, in the order of their numbers; None: those that are found.
        folders_of: gives the class of each image by its name where the tars do not tell it.

    Raises:
        ConfigurationError: a tar is damaged, or an image has no class or one that is not known; the message names it.
    """
    index = _kept_index(tars, report)
    names = [os.fsdecode(name) for name in index.names.tolist()]
    if not names:
        raise ConfigurationError(f"{some_of([str(tar) for tar in tars])}: no image in it ({', '.join(SUFFIXES)})")
    if len(index.labels):
        of_images = [str(label) for label in index.labels.tolist()]
        found = [str(number) for number in range(index.labels.max() + 1)]
    else:
        names = _in_folders(names, tars[index.places[0, 0]], folders_of)
        order = sorted(range(len(names)), key=names.__getitem__)
        names = [names[place] for place in order]
        index = TarIndex(index.names[order], index.places[order], index.labels)
        of_images = [name.partition("/")[0] for name in names]
        found = sorted(set(of_images))
    number = {name: label for label, name in enumerate(known or found)}
    for place, name in enumerate(of_images):
        if name not in number:
            image = tars[index.places[place, 0]] / names[place]
            raise ConfigurationError(f"{image} is of class '{name}', which the training images have not")
    return ImagesInTars(tars, index, names, [number[name] for name in of_images], list(number))


def _in_folders(names: Sequence[str], tar: Path, folders_of: FoldersOf | None) -> list[str]:
    """Returns the names of images as if each lay in the folder of its class."""
    if all(IN_TAR in name for name in names):
        return [name.replace(IN_TAR, "/") for name in names]
    if folders_of is None:
        raise ConfigurationError(f"{tar / names[0]} has no {CLASS} file with its class: write one, or unpack the tar")
    return [f"{folder}/{name}" for folder, name in zip(folders_of(names), names, strict=True)]


def _kept_index(tars: Sequence[Path], report: Report) -> TarIndex:
    """Returns the index of tar files from the cache; it is made again when a file's size or time has changed."""
    states = [(str(tar.resolve()), tar.stat().st_size, tar.stat().st_mtime_ns) for tar in tars]
    kept = cache_folder(None) / "tars" / f"{fingerprint_of(repr(states).encode())}.npz"

    def make(draft: Path) -> None:
        index = _index(tars, report)
        np.savez(draft, names=index.names, places=index.places, labels=index.labels)

    with writing(kept.parent, "set GPIPE_CACHE to a folder with room"):
        made(kept, make, report)
    with np.load(kept) as arrays:
        return TarIndex(arrays["names"], arrays["places"], arrays["labels"])


def _index(tars: Sequence[Path], report: Report) -> TarIndex:
    names, places, labels = list[bytes](), list[tuple[int, int, int]](), list[int]()
    for number, tar in enumerate(tars):
        images, classes = dict[str, tuple[int, int]](), dict[str, int]()
        with tar.open("rb") as file:
            for name, first, size in _members(file, tar):
                if name.lower().endswith(SUFFIXES):
                    images[name] = (first, size)
                    if len(images) % 1000 == 1:
                        report(f"listing the images of {tar}", first, tar.stat().st_size)
                elif name.endswith(CLASS):
                    classes[_key(name)] = _class(os.pread(file.fileno(), size, first), tar / name)
        report(f"listing the images of {tar}", 1, 1)
        if classes or labels:
            _check_pairs(tar, [_key(name) for name in images], classes)
        if classes and len(labels) < len(names):
            raise ConfigurationError(f"{tar} has {CLASS} files, but {tars[0]} has none")
        names += [os.fsencode(name) for name in images]
        places += [(number, *place) for place in images.values()]
        labels += [classes[_key(name)] for name in images] if classes else []
    return TarIndex(np.array(names), np.array(places, np.int64).reshape(-1, 3), np.array(labels, np.int64))


def _check_pairs(tar: Path, images: Sequence[str], classes: Collection[str]) -> None:
    """Checks that each image has a label and each label an image, by what their names have in common."""
    faults = {
        "images without": set(images) - set(classes),
        "no images for": set(classes) - set(images),
        "two images for one of": set(Counter(images) - Counter(set(images))),
    }
    for fault, names in faults.items():
        if names:
            raise ConfigurationError(f"{tar} has {fault} the {CLASS} files: {some_of(list(names))}")


def _members(file: BinaryIO, path: Path, start: int = 0, folder: str = "") -> Iterator[tuple[str, int, int]]:
    """Yields name, first byte and bytes of each file in a tar, and of each in the tars in it."""
    last = "its start"
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                last, name = member.name, member.name.removeprefix("./")
                if member.isdir() or name.rpartition("/")[2].startswith("."):
                    continue
                if not member.isfile():
                    raise ConfigurationError(
                        f"{path / folder / name} is a link: write the tar with --hard-dereference -h"
                    )
                first = start + member.offset_data
                if name.endswith(".tar"):
                    yield from _members(cast(BinaryIO, tar.extractfile(member)), path, first, f"{folder}{name}/")
                else:
                    yield f"{folder}{name}", first, member.size
            file.seek(tar.offset)
            whole = file.read(BLOCK) == bytes(BLOCK)  # tarfile ends without a word at a header that it cannot read
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigurationError(
            f"{path / folder} after {last}: {error}: it must be a whole tar, not packed"
        ) from error
    if not whole:
        raise ConfigurationError(f"{path / folder} is cut off or damaged after {last}: load it again")


def _key(name: str) -> str:
    """Returns what an image has in common with its label: the name up to the first dot."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _class(content: bytes, place: Path) -> int:
    if not content.strip().isdigit():
        raise ConfigurationError(f"{place}: {content[:20]!r} is not the number of a class")
    return int(content)
