"""Reads labelled images one at a time, from files on disk or from an array in memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ...disk import refuse_pointer
from ...errors import ConfigurationError
from ..source import fingerprint_of

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

SIXTEEN_BITS = ("PNG", "PPM")  # formats whose images in Pillow's mode of 32-bit integers have 16 bits
BITS_OF_TIFF = 258  # the tag
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "PPM", "TIFF")  # others, as EPS, would start other programs


class BrokenImage(ConfigurationError):
    """Raised when an image cannot be decoded; the message names it."""

    def __str__(self) -> str:
        """Returns the message without the traceback of a loader process, which PyTorch puts before it."""
        return super().__str__().rpartition(f"{type(self).__name__}: ")[2].rstrip()


class ImageFiles:
    """Reads one split of a data set, image files under one folder.

    Args:
        root: the folder.
        names: paths of the images below root, with "/" between folders. They are kept as bytes in one array and not
            as a million strings, because loader processes would copy the memory of every string they touch.
        labels: number of each file's class.
        class_names: the names of the classes, by label.

    Attributes:
        labels: int64 [n], numbers of `class_names`.
    """

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int], class_names: Sequence[str]) -> None:
        self.labels, self.class_names = np.asarray(labels, np.int64), tuple(class_names)
        self._root, self._names = root, np.array([os.fsencode(name) for name in names])

    def __len__(self) -> int:
        return len(self.labels)

    def paths(self) -> Iterator[Path]:
        """Yields the path of every image."""
        return (self._root / os.fsdecode(name) for name in self._names.tolist())

    def only(self, chosen: Sequence[bool]) -> ImageFiles:
        """Returns the chosen images; ``chosen`` has a value for each."""
        names = [os.fsdecode(name) for name in self._names[np.array(chosen)].tolist()]
        return ImageFiles(self._root, names, self.labels[np.array(chosen)].tolist(), self.class_names)

    def fingerprint(self) -> str:
        """Returns a digest of the names and order of the images; their contents are not read."""
        names = self._names.tolist()
        ends = np.cumsum([0, *map(len, names)], dtype=np.int64)
        return fingerprint_of(b"".join(names), ends.tobytes(), self.labels.tobytes())

    def read(self, index: int) -> Tensor:
        """Returns image `index` as uint8 [3, H, W].

        Raises:
            BrokenImage: it cannot be decoded.
        """
        path, file = self._file(index, os.fsdecode(self._names[index]))
        try:
            return decode(file)
        except Exception as error:  # a decoder may raise anything on a broken file
            if path.is_file():
                refuse_pointer(path)
            raise BrokenImage(
                f"{path} is broken ({type(error).__name__}: {error}), or none of {', '.join(FORMATS)}: replace it, or "
                "take it out of the data"
            ) from error

    def _file(self, index: int, name: str) -> tuple[Path, Path | BinaryIO]:
        """Returns the path of an image, for messages, and the file or path to decode."""
        return self._root / name, self._root / name


class ImageArray(ImageFiles):
    """Reads images of one size from memory: uint8 [n, 3, H, W]."""

    def __init__(self, images: Tensor, labels: Sequence[int], class_names: Sequence[str]) -> None:
        super().__init__(Path(), (), labels, class_names)
        self._images = images

    def fingerprint(self) -> str:
        return fingerprint_of(repr(tuple(self._images.shape)).encode(), self.labels.tobytes())

    def read(self, index: int) -> Tensor:
        return self._images[index]


def decode(file: Path | BinaryIO) -> Tensor:
    """Decodes an image of any format and colours, turned as its EXIF data say, to uint8 [3, H, W].

    It uses Pillow: torchvision's own decoder, a little faster, is deprecated. The channels stay last in memory, because
    torchvision then resizes bytes fastest.

    Raises:
        Exception: anything that Pillow raises for a broken or very large file, or numbers without a known range.
    """
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged EXIF data
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # of more than 89 million pixels
        with Image.open(file, formats=FORMATS) as image:
            image.load()
            with suppress(Exception):  # damaged EXIF data raise anything
                ImageOps.exif_transpose(image, in_place=True)
            return torch.from_numpy(np.array(_bytes_of(image))).permute(2, 0, 1)


def _bytes_of(image: PillowImage) -> PillowImage:
    """Returns the image in 8-bit RGB, on white.

    One channel of 16 bits, or of floats from 0 to 1, is scaled to bytes. Pillow's `convert` would clip it instead: 16
    bits would become white, and floats black.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN_BITS):
        values = np.asarray(image).astype(np.uint32)
        bits = getattr(image, "tag_v2", {}).get(BITS_OF_TIFF, (16,))[0]
        values[values == image.info.get("transparency", -1)] = 2**16 - 1  # the value that a PNG calls transparent
        image = Image.fromarray(np.minimum(values >> (bits - 8), 255).astype(np.uint8))
    elif image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    elif image.mode == "F":
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 1):  # also where one is not a number
            raise ValueError(f"floats from {values.min():g} to {values.max():g}: only those from 0 to 1 can be read")
        image = Image.fromarray((values * 255).round().astype(np.uint8))
    elif image.mode == "I":
        raise ValueError("32-bit integers, whose range is not known")
    return image.convert("RGB")
