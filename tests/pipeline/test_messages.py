"""Tests that messages between workers arrive as they were sent, through shared memory and over gloo."""

import pytest
import torch

from gpipe_cli.benchmarks.tables.workers import run_workers
from gpipe_cli.pipeline.messages import boundary


@pytest.mark.parametrize("wire", ["shared memory", "gloo"])
def test_every_sort_of_message_arrives_as_it_was_in_memory_of_its_own(wire: str) -> None:
    found = run_workers("group_jobs:send_both_ways", 2, {"wire": wire})
    assert len(found) == 102
    assert all(found)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_part_of_a_larger_tensor_is_aligned_alike_sent_or_passed_on(layout: torch.memory_format) -> None:
    """Matrix products on GPUs take other kernels for addresses that are no multiples of 256 bytes."""
    assert boundary.ALIGNMENT % 256 == 0
    part = torch.randn(2, 3, 4, 5).contiguous(memory_format=layout)[1:]
    last = layout is torch.channels_last
    spec = boundary.BoundarySpec.of((part, part))
    sent = boundary.unpack(boundary.pack((part, part), spec, part.device), spec)
    for tensor in (boundary.canonical(part), boundary.canonical_gradient(part, last), *sent):
        assert torch.equal(tensor, part) and boundary.is_channels_last(tensor) == last
        assert tensor.storage_offset() * tensor.itemsize % boundary.ALIGNMENT == 0


def test_tensors_that_torch_conjugates_when_they_are_read_arrive_as_their_values() -> None:
    conjugated = torch.randn(2, 3, dtype=torch.complex64).conj()
    for tensor in (conjugated, conjugated.imag):
        spec = boundary.BoundarySpec.of((tensor,))
        sent = boundary.unpack(boundary.pack((tensor,), spec, tensor.device), spec)
        for found in (boundary.canonical(tensor), *sent):
            assert torch.equal(found, tensor) and not (found.is_conj() or found.is_neg())


@pytest.mark.filterwarnings("ignore:.*uantiz")
def test_tensors_that_are_no_plain_numbers_are_refused() -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8)):
        with pytest.raises(TypeError, match="a sparse or quantized tensor cannot pass to the next layer"):
            boundary.BoundarySpec.of((tensor,))
