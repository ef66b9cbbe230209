"""Reads labelled images one at a time, from files on disk or from an array in memory."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..source import fingerprint_of


class BrokenImage(NamedTuple):
    """Holds the name of an image that could not be read, and the decoder's message."""

    name: str
    reason: str


class BrokenImageError(Exception):
    """Raised when an image cannot be decoded; holds the `BrokenImage`."""

    def __init__(self, broken: BrokenImage) -> None:
        super().__init__(f"{broken.name}: {broken.reason}")
        self.broken = broken


class Images(Protocol):
    """Reads one split of a data set.

    Attributes:
        labels: int64 [n], numbers of `class_names`.
    """

    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Returns a digest of the names and order of the images; their contents are not read."""

    def read(self, index: int) -> Tensor:
        """Returns image `index` as uint8 [3, H, W].

        Raises:
            BrokenImageError: it cannot be decoded.
        """


class ImageFiles:
    """Reads image files under one folder.

    Args:
        root: the folder.
        names: paths from `root`, with "/" between folders. They are kept as bytes in one array and not as a million
            strings, because loader processes would copy the memory of every string they touch.
        labels: of each file.
        class_names: the names of the classes, by label.
    """

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int], class_names: Sequence[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self.root, self.class_names = root, tuple(class_names)
        self.labels = np.asarray(labels, np.int64)
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def relabelled(self, labels: npt.NDArray[np.int64], class_names: Sequence[str]) -> ImageFiles:
        """Returns the same files with other class numbers."""
        changed = copy.copy(self)
        changed.labels, changed.class_names = labels, tuple(class_names)
        return changed

    def path(self, index: int) -> Path:
        name = self._bytes[self._ends[index] : self._ends[index + 1]].tobytes()
        return self.root / os.fsdecode(name)

    def fingerprint(self) -> str:
        return fingerprint_of(self._bytes.tobytes(), self._ends.tobytes(), self.labels.tobytes())

    def read(self, index: int) -> Tensor:
        path = self.path(index)
        try:
            return decode(path.read_bytes())
        except Exception as error:  # a decoder may raise anything on a broken file
            raise BrokenImageError(BrokenImage(str(path), _reason(error))) from error


class ImageArray:
    """Reads images of one size from memory: uint8 [n, 3, H, W]."""

    def __init__(self, images: Tensor, labels: Sequence[int], class_names: Sequence[str]) -> None:
        self._images, self.class_names = images, tuple(class_names)
        self.labels = np.asarray(labels, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        return fingerprint_of(repr(tuple(self._images.shape)).encode(), self.labels.tobytes())

    def read(self, index: int) -> Tensor:
        return self._images[index]


def decode(encoded: bytes) -> Tensor:
    """Decodes an image of any format and colours to uint8 [3, H, W].

    It uses Pillow: torchvision's own decoder, a little faster, is deprecated. The channels stay last in memory, because
    torchvision then resizes bytes fastest.
    """
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = (str(error).splitlines() or [""])[0].split(" <_io.")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
