"""Labelled images that are decoded when they are asked for: files on disk, or an array in memory."""

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
    """An image that could not be read, and what the decoder said."""

    name: str
    reason: str


class BrokenImageError(Exception):
    """Raised by `read`; carries the `BrokenImage`."""

    def __init__(self, broken: BrokenImage) -> None:
        super().__init__(f"{broken.name}: {broken.reason}")
        self.broken = broken


class Images(Protocol):
    """One split of a data set.

    Attributes:
        labels: of each image, numbers of `class_names`; int64 [n].
    """

    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Of which images there are, in their order; their contents are not read."""

    def read(self, index: int) -> Tensor:
        """Image `index` as uint8 [3, H, W].

        Raises:
            BrokenImageError: it cannot be decoded.
        """


class ImageFiles:
    """Image files under one folder.

    Args:
        root: the folder.
        names: paths from `root`, with "/" between folders. They are kept as bytes in one array, not as a million
            strings: loader processes would copy the memory of every string that they touch.
        labels: of each file.
        class_names: what the labels stand for.
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
        """The same files under other class numbers."""
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
        except Exception as error:  # a decoder that meets garbage raises whatever the garbage leads it to
            raise BrokenImageError(BrokenImage(str(path), _reason(error))) from error


class ImageArray:
    """Images of one size in memory: uint8 [n, 3, H, W]."""

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
    """An encoded image to uint8 [3, H, W], whatever its format and colours.

    Pillow does it: torchvision's own decoder, a little faster, is deprecated. The channels stay last in memory, the
    order in which torchvision resizes bytes fastest.
    """
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = (str(error).splitlines() or [""])[0].split(" <_io.")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
