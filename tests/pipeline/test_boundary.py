"""Tests that boundaries are described, packed into one message, and unpacked again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_cli.pipeline.messages.boundary import BoundarySpec, fresh_leaves, is_channels_last, pack, unpack

CPU = torch.device("cpu")
NUMBERS = torch.arange(1, 31)
IMAGES = torch.randn(2, 3, 4, 5)
BOUNDARIES = {
    "one tensor": (torch.randn(2, 3),),
    "one of an odd number of bytes": (NUMBERS.bool()[:7],),
    "activations and targets": (torch.randn(4, 6), NUMBERS[:4]),
    "all sizes of numbers": tuple(NUMBERS.to(t) for t in (torch.bool, torch.bfloat16, torch.float32, torch.float64)),
    "a number without dimensions": (torch.tensor(3.5), torch.tensor(True)),
    "an empty tensor between two": (NUMBERS, torch.zeros(0, 4), NUMBERS.int()),
    "rows that are not contiguous": (torch.randn(6, 4).t(), NUMBERS[::3]),
    "expanded": (torch.randn(1, 4).expand(3, 4),),
    "images": (IMAGES, NUMBERS[:2]),
    "channels-last images": (IMAGES.contiguous(memory_format=torch.channels_last), NUMBERS[:2]),
    "channels-last images alone": (IMAGES.contiguous(memory_format=torch.channels_last),),
    "nothing": (),
}


@pytest.fixture(params=BOUNDARIES)
def tensors(request: pytest.FixtureRequest) -> tuple[Tensor, ...]:
    return BOUNDARIES[request.param]


def test_packed_tensors_are_unpacked_with_their_values_and_layouts(tensors: tuple[Tensor, ...]) -> None:
    spec = BoundarySpec.of(tensors)
    message = pack(tensors, spec, CPU)
    assert message.dtype == torch.uint8 and message.shape == (spec.size,)
    for taken, given in zip(unpack(message.clone(), spec), tensors, strict=True):
        assert taken.dtype == given.dtype
        assert torch.equal(taken, given)
        assert is_channels_last(taken) == is_channels_last(given)
        assert taken.is_contiguous() or is_channels_last(given)


def test_the_other_side_decodes_the_same_description(tensors: tuple[Tensor, ...]) -> None:
    spec = BoundarySpec.of(tensors)
    assert BoundarySpec.from_json(spec.to_json()) == spec


def test_leaves_collect_gradients_where_the_boundary_needs_them() -> None:
    spec = BoundarySpec.of((torch.randn(3, requires_grad=True), torch.arange(3)))
    values, ids = fresh_leaves((torch.randn(3) * 2, torch.arange(3)), spec.takers)
    assert values.requires_grad and values.is_leaf
    assert not ids.requires_grad
