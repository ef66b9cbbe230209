"""Writes tar files of images: of given files, or a split in shards as WebDataset writes them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path


def write_tar(tar: Path, files: Sequence[Path]) -> None:
    """Writes files by their names alone."""
    with tarfile.open(tar, "w") as archive:
        for file in files:
            archive.add(file, file.name)


def write_shards(split: Path, pattern: Path, images_of_shard: int) -> None:
    """Writes the class folders of a split as shards `pattern-0000.tar`, …, in order, and numbers the classes."""
    classes = sorted(path.name for path in split.iterdir())
    images = sorted(split.glob("*/*"))
    pattern.parent.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(images), images_of_shard):
        with tarfile.open(f"{pattern}-{first // images_of_shard:04}.tar", "w") as archive:
            for image in images[first : first + images_of_shard]:
                label = str(classes.index(image.parent.name)).encode()
                for ending, content in (("jpg", image.read_bytes()), ("cls", label), ("json", b"{}")):
                    add(archive, f"./{image.stem}.{ending}", content)


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
