"""Tests a sample of benchmarks/traced: traced modules, cut into cells, have the module's own loss and gradients."""

from __future__ import annotations

import pytest

from benchmarks.traced.check import CASES, find
from benchmarks.traced.modules import subjects

FAST = (
    *("gpt2", "opt", "bert", "distilbert", "electra", "fnet", "pegasus"),
    *("torchvision squeezenet1_1", "beit (images)", "dinov2 (images)", "resnet (images)", "vit (images)"),
)
FEW = [(1, "never"), (2, "always"), (4, "never")]  # of the benchmark's cases
MORE = (
    "t5",
    "torchvision shufflenet_v2_x0_5",
    "llama",
    "albert",
    "mamba",
    "bart",
    "gptj",
    "bloom",
    "torchvision mobilenet_v3_small",
)


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        *(pytest.param(name, marks=pytest.mark.slow(2)) for name in MORE),
    ],
)
def test_a_traced_module_is_verified(name: str) -> None:
    if not name.startswith("torchvision"):
        pytest.importorskip("transformers")
    (subject,) = (subject for subject in subjects() if subject.name == name)
    found = find(subject, FEW if name in FAST else CASES)
    assert found.verified, found
