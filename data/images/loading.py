"""Does the work of loader processes: reads, transforms and stacks images; decides how many of them there are."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ...cpu import usable_cores
from ...micro_batch import MicroBatch
from .files import BrokenImageError, Images
from .transforms import Transform

MOST_WORKERS = 16  # chosen by "auto": more would only fill the memory with mini-batches


class Example(NamedTuple):
    """Holds one transformed image, uint8 [3, S, S], or None if none could be read, and the broken images tried."""

    image: Tensor | None
    label: int
    broken: tuple[BrokenImageError, ...]


class LoadedMicroBatch(NamedTuple):
    """Holds what a loader process returns: uint8 [b, 3, S, S], int64 [b], and the broken images tried."""

    images: Tensor
    labels: Tensor
    broken: tuple[BrokenImageError, ...]

    @property
    def tensors(self) -> MicroBatch:
        return (self.images,), (self.labels,)


class TransformedImages(Dataset[Example]):
    """Reads and transforms images.

    Args:
        images: to read.
        transform: bytes to bytes; draws from torch's global generator.
        attempts: how many images are tried for an example: the given one, then the next ones.
    """

    def __init__(self, images: Images, transform: Transform, attempts: int) -> None:
        self.images, self._transform, self._attempts = images, transform, attempts

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Example:
        broken = []
        for place in range(self._attempts):
            number = (index + place) % len(self)
            try:
                image = self.images.read(number)
            except BrokenImageError as error:
                broken.append(error)
            else:
                return Example(self._transform(image), int(self.images.labels[number]), tuple(broken))
        return Example(None, -1, tuple(broken))


def collate(examples: list[Example]) -> LoadedMicroBatch:
    """Returns a micro-batch of the examples that have an image."""
    images = [example.image for example in examples if example.image is not None]
    labels = [example.label for example in examples if example.image is not None]
    # default_collate stacks directly into memory shared with the training process.
    stacked: Tensor = default_collate(images) if images else torch.empty(0, dtype=torch.uint8)
    broken = tuple(image for example in examples for image in example.broken)
    return LoadedMicroBatch(stacked, torch.tensor(labels, dtype=torch.int64), broken)


def loader_workers(workers: int | str, replicas: int) -> int:
    """Returns the loader processes of one replica; "auto" divides the cores among the replicas on this machine."""
    if workers != "auto":
        return int(workers)
    everywhere, here = (int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    replicas_here = -(-replicas * min(here, everywhere) // everywhere)
    return max(1, min(MOST_WORKERS, usable_cores() // replicas_here))


def typical_images(micro_batches: int, batch_size: int, image_size: int) -> tuple[MicroBatch, int]:
    """Returns a micro-batch on the meta device, without data, and the examples of a mini-batch."""
    count = -(-batch_size // micro_batches)
    images = torch.empty((count, 3, image_size, image_size), dtype=torch.uint8, device="meta")
    return ((images,), (torch.empty(count, dtype=torch.int64, device="meta"),)), batch_size
