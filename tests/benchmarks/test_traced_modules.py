"""Tests a sample of benchmarks/traced: modules, cut into cells, are equal to themselves."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from benchmarks.traced.check import find
from benchmarks.traced.modules import subject

FEW = [(1, "never"), (4, "always")]  # of the benchmark's cases
LENGTH = 5  # tokens, where the test makes the benchmark's module smaller still
SMALLER: dict[str, dict[str, Any]] = {
    "t5": {"num_layers": 1, "num_decoder_layers": 1},  # encoder and decoder, with trained biases of attention
    "mamba": {"num_hidden_layers": 1, "state_size": 4},  # a state space: one step for each token
    "mixtral": {"num_hidden_layers": 1, "experts_implementation": "batched_mm"},  # a mixture of experts
}
SAMPLE = (
    *("gpt2", "bert", "xlnet", "mamba", "mixtral", pytest.param("t5", marks=pytest.mark.slow)),
    *("squeezenet1_1", "beit"),
)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_traced_module_is_verified(name: str) -> None:
    pytest.importorskip("transformers")
    made = subject(name)
    if name in SMALLER:
        usual = made.inputs

        def inputs(examples: int) -> tuple[Tensor, ...]:
            return tuple(tokens[:, -LENGTH:] for tokens in usual(examples))

        made = replace(made, constructor=partial(made.constructor, **SMALLER[name]), inputs=inputs)
    found = find(made, FEW)
    assert found.verified, found
