"""What a layer may return; anything else is told with what was found."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.pipeline.boundary import as_tensors

ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ((ONE, None), "not a tuple with None as item 1"),
        ((ONE, (ONE, ONE)), "not a tuple with a tuple as item 1: return its tensors one beside"),
        ({"x": ONE, "mask": ONE}, "not a dict with the keys x, mask: return its values as a tuple"),
        (None, "not None"),
        (3, "not int"),
    ],
    ids=["None in a tuple", "LSTM", "dict", "None", "int"],
)
def test_what_a_layer_may_not_return_is_named(value: object, found: str) -> None:
    with pytest.raises(TypeError, match=f"a layer returns a tensor or a tuple of tensors, {found}"):
        as_tensors(value)
