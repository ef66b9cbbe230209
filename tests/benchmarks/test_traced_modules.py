"""Tests a sample of benchmarks/traced: traced modules, cut into cells, have the module's own loss and gradients."""

from __future__ import annotations

import pytest

from benchmarks.traced.check import find
from benchmarks.traced.modules import subjects

SAMPLE = ("gpt2", "t5", "torchvision shufflenet_v2_x0_5")
MORE = (
    "llama",
    "bert",
    "albert",
    "mamba",
    "bart",
    "gptj",
    "bloom",
    "resnet (images)",
    "torchvision mobilenet_v3_small",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SAMPLE else pytest.mark.slow(2))
        for name in (*SAMPLE, *MORE)
    ],
)
def test_a_traced_module_is_verified(name: str) -> None:
    if not name.startswith("torchvision"):
        pytest.importorskip("transformers")
    (subject,) = (subject for subject in subjects() if subject.name == name)
    found = find(subject)
    assert found.verified, found
