"""Tests that messages between workers arrive as they were sent, through shared memory and over gloo."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.bench.workers import run_workers
from gpipe_cli.pipeline.messages.boundary import (
    ALIGNMENT,
    BoundarySpec,
    canonical,
    canonical_gradient,
    is_channels_last,
    pack,
    unpack,
)


@pytest.mark.parametrize("wire", ["shared memory", "gloo"])
def test_every_sort_of_message_arrives_as_it_was_in_memory_of_its_own(wire: str) -> None:
    found = run_workers("group_jobs:send_both_ways", 2, {"wire": wire})
    assert len(found) == 102
    assert all(found)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_part_of_a_larger_tensor_is_aligned_alike_whether_it_is_sent_or_passed_on(
    layout: torch.memory_format,
) -> None:
    """Matrix products on GPUs take other kernels for addresses that are no multiples of 256 bytes."""
    assert ALIGNMENT % 256 == 0
    part = torch.randn(2, 3, 4, 5).contiguous(memory_format=layout)[1:]
    last = layout is torch.channels_last
    spec = BoundarySpec.of((part, part))
    sent = unpack(pack((part, part), spec, part.device), spec)
    for tensor in (canonical(part), canonical_gradient(part, last), *sent):
        assert torch.equal(tensor, part) and is_channels_last(tensor) == last
        assert tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0
