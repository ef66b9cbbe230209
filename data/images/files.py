"""Reads labelled images one at a time, from files on disk or from an array in memory."""

from __future__ import annotations

import copy
import io
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..source import fingerprint_of

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

MOST_BYTES = 2**29  # of a file; each loader process holds one
MOST_PIXELS = 89_478_485  # of an image: 256 MiB in RGB. Pillow itself only warns from here to twice as many
SIXTEEN_BITS = ("PNG", "PPM")  # formats whose images in Pillow's mode of 32-bit integers have 16 bits
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "PPM", "TIFF")  # others, as EPS, would start other programs


class BrokenImageError(Exception):
    """Raised when an image cannot be decoded."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason


class Images(Protocol):
    """Reads one split of a data set.

    Attributes:
        labels: int64 [n], numbers of `class_names`.
        others: files beside the images that are no images.
    """

    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    others: int

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
        others: the number of files beside them that are no images.
    """

    def __init__(
        self, root: Path, names: Sequence[str], labels: Sequence[int], class_names: Sequence[str], others: int = 0
    ) -> None:
        self.others = others
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
            with path.open("rb") as file:
                if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
                    raise ValueError(f"{size:,} bytes, more than {MOST_BYTES:,}")
                return decode(file.read())
        except Exception as error:  # a decoder may raise anything on a broken file
            raise BrokenImageError(str(path), _reason(error)) from error


class ImageArray:
    """Reads images of one size from memory: uint8 [n, 3, H, W]."""

    others = 0

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
    """Decodes an image of any format and colours, turned as its EXIF data say, to uint8 [3, H, W].

    It uses Pillow: torchvision's own decoder, a little faster, is deprecated. The channels stay last in memory, because
    torchvision then resizes bytes fastest.

    Raises:
        ValueError: the image is too large, or its numbers have no known range.
        Exception: anything that Pillow raises for a broken file.
    """
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged EXIF data
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:  # checked before Pillow reserves memory for them
                raise ValueError(f"{width:,}×{height:,} pixels, more than {MOST_PIXELS:,}")
            image.load()
            with suppress(Exception):  # damaged EXIF data raise anything
                ImageOps.exif_transpose(image, in_place=True)
            return torch.from_numpy(np.array(_bytes_of(image))).permute(2, 0, 1)


def _bytes_of(image: PillowImage) -> PillowImage:
    """Returns the image in 8-bit RGB; one channel of 16 bits or of floats from 0 to 1 is scaled to bytes.

    Pillow's `convert` would clip them instead: 16 bits would become white, and floats black.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN_BITS):
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 1):  # also where one is not a number
            raise ValueError(f"floats from {values.min():g} to {values.max():g}: only those from 0 to 1 can be read")
        return Image.fromarray((values * 255).round().astype(np.uint8)).convert("RGB")
    if image.mode == "I":
        raise ValueError("32-bit integers, whose range is not known")
    return image.convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = (str(error).splitlines() or [""])[0].split(" <_io.")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
