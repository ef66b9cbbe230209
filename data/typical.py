"""Micro-batches as shapes alone: what a source's optional method `typical_micro_batch` returns, for plans made without data.

    typical_micro_batch(micro_batches, longest) -> (part, examples)

`part` is the largest of the `micro_batches` that a typical mini-batch is divided into (M times replicas), its tensors on the
meta device; `examples` are those of the mini-batch. With `longest` sequences are as long as the source's limits allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..micro_batch import MicroBatch

TOKENS_OF_WIDTH = 0.8  # of a padded target, as CLDR batches have them: the rest is padding


def images(micro_batches: int, batch_size: int, image_size: int) -> tuple[MicroBatch, int]:
    """Bytes of images, and their labels."""
    count = -(-batch_size // micro_batches)
    shape = (count, 3, image_size, image_size)
    made = torch.empty(shape, dtype=torch.uint8, device="meta"), torch.empty(count, dtype=torch.int64, device="meta")
    return ((made[0],), (made[1],)), batch_size


def blocks(micro_batches: int, batch_size: int, length: int) -> tuple[MicroBatch, int]:
    """Blocks of tokens, and the tokens that follow."""
    ids = torch.empty(-(-batch_size // micro_batches), length, dtype=torch.int64, device="meta")
    return ((ids,), (ids.clone(),)), batch_size


def pairs(
    micro_batches: int, batch_size: int | None, batch_tokens: int | None, source: int, target: int
) -> tuple[MicroBatch, int]:
    """Sentence pairs: (source, target_in), (target_out); counted themselves, or in target tokens."""
    examples = batch_size or 1
    if batch_tokens is not None:
        examples = max(micro_batches, round(batch_tokens / (TOKENS_OF_WIDTH * target)))
    count = -(-examples // micro_batches)
    from_, to = (torch.empty(count, length, dtype=torch.int64, device="meta") for length in (source, target))
    return ((from_, to), (to.clone(),)), examples
