"""Tests a sample of benchmarks/traced: traced modules, cut into cells, have the module's own loss and gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from benchmarks.traced.check import CASES, find
from benchmarks.traced.modules import subjects
from benchmarks.traced.subject import TracedSubject

FEW = [(1, "never"), (2, "always"), (4, "never")]  # of the benchmark's cases
LENGTH = 5  # tokens, where the test makes the benchmark's module smaller still
SMALLER: dict[str, dict[str, Any]] = {
    "pegasus": {"encoder_layers": 1, "decoder_layers": 1},  # encoder and decoder
    "t5": {"num_layers": 1, "num_decoder_layers": 1},  # the same, with biases of attention that are trained
    "mamba": {"num_hidden_layers": 1, "state_size": 4},  # a state space: one step for each token
    "mixtral": {"num_hidden_layers": 1, "experts_implementation": "batched_mm"},  # a mixture of experts
}
DOZEN = (
    *("gpt2", "opt", "bert", "fnet", "pegasus", "mamba", "mixtral", pytest.param("t5", marks=pytest.mark.slow)),
    *("torchvision squeezenet1_1", "beit (images)", "dinov2 (images)", "resnet (images)", "vit (images)"),
)
MORE = (
    *("bart", "torchvision shufflenet_v2_x0_5", "llama", "albert", "mamba", "t5", "gptj", "bloom", "olmoe"),
    "torchvision mobilenet_v3_small",
)


def named(name: str) -> TracedSubject:
    if not name.startswith("torchvision"):
        pytest.importorskip("transformers")
    (subject,) = (subject for subject in subjects() if subject.name == name)
    return subject


@pytest.mark.parametrize("name", DOZEN)
def test_a_traced_module_is_verified(name: str) -> None:
    subject = named(name)
    if name in SMALLER:
        usual = subject.inputs

        def inputs(examples: int) -> tuple[Tensor, ...]:
            return tuple(tokens[:, -LENGTH:] for tokens in usual(examples))

        subject = replace(subject, constructor=partial(subject.constructor, **SMALLER[name]), inputs=inputs)
    found = find(subject, FEW)
    assert found.verified, found


@pytest.mark.slow(2)
@pytest.mark.parametrize("name", MORE)
def test_another_traced_module_is_verified(name: str) -> None:
    found = find(named(name), CASES)
    assert found.verified, found
