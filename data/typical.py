"""Makes micro-batches without data, shapes alone: what a source's optional method `typical_micro_batch` returns.

    typical_micro_batch(micro_batches, longest) -> (micro_batch, examples)

A typical mini-batch of `examples` examples is divided into `micro_batches` (of all replicas); `micro_batch` is the
largest of them, its tensors on the meta device. With `longest` sequences are as long as the source's limits allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..micro_batch import MicroBatch

TOKENS_OF_WIDTH = 0.8  # of a padded target, as CLDR batches have them: the rest is padding


def images(M: int, batch_size: int, image_size: int) -> tuple[MicroBatch, int]:
    """Bytes of images, and their labels."""
    count = -(-batch_size // M)
    shape = (count, 3, image_size, image_size)
    made = torch.empty(shape, dtype=torch.uint8, device="meta"), torch.empty(count, dtype=torch.int64, device="meta")
    return ((made[0],), (made[1],)), batch_size


def blocks(M: int, batch_size: int, length: int) -> tuple[MicroBatch, int]:
    """Blocks of tokens, and the tokens that follow."""
    ids = torch.empty(-(-batch_size // M), length, dtype=torch.int64, device="meta")
    return ((ids,), (ids.clone(),)), batch_size


def pairs(M: int, batch_size: int | None, batch_tokens: int | None, source: int, target: int) -> tuple[MicroBatch, int]:
    """Sentence pairs: (source, target_in), (target_out); counted themselves, or in target tokens."""
    examples = batch_size or 1
    if batch_tokens is not None:
        examples = max(M, round(batch_tokens / (TOKENS_OF_WIDTH * target)))
    count = -(-examples // M)
    from_, to = (torch.empty(count, length, dtype=torch.int64, device="meta") for length in (source, target))
    return ((from_, to), (to.clone(),)), examples
