"""Tests a sample of benchmarks/traced: modules, cut into cells, are equal to themselves or refused with a line."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import getsourcefile, getsourcelines
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks.traced.as_written import blocks, operations, state, weights, written
from benchmarks.traced.as_written.given import vectors
from benchmarks.traced.check import DIFFERENT, find
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
    *("gpt2", "opt", "bert", "fnet", "xlnet", "mamba", "mixtral", pytest.param("t5", marks=pytest.mark.slow)),
    *("torchvision squeezenet1_1", "beit (images)", "dinov2 (images)", "resnet (images)", "vit (images)"),
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


@pytest.mark.parametrize(
    "module",
    [
        *(weights.TiedInList, weights.HiddenParameter, weights.KeepsTranspose, weights.FreezesInTrain),
        *(
            operations.FillsPart,
            operations.ClampsActivations,
            operations.HalfAccumulator,
            operations.BranchesOnTraining,
        ),
        *(state.FrozenBatchNorm, state.PositionsAtFirstCall, blocks.SparseMixture),
    ],
)
def test_a_module_as_written_is_equal_to_itself(module: type[nn.Module]) -> None:
    found = find(as_written(module), FEW)
    assert found.verified, found


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        (weights.FreezesInForward, "self.body.requires_grad_(False)", "replaces the requires_grad of the parameter"),
        (weights.SpectralNormed, None, "as spectral_norm does"),
        (weights.Lazy, None, "its parameter body.weight gets a shape only from the first input"),
        (weights.MasksGradient, None, "its parameter body.weight has a hook on its gradient"),
        (state.CountsCalls, "self.calls += 1", "keeps calls for its next call"),
        (state.UpdatesView, "self.statistics[0].mul_(0.9).add_(h.mean(0), alpha=0.1)", "changes statistics in place"),
        (
            state.AssignsBuffer,
            "self.centre = 0.9 * self.centre + 0.1 * h.detach().mean(0)",
            "replaces the buffer centre",
        ),
        (state.MomentumEncoder, "slow.data = slow.data * 0.9 + fast.data * 0.1", "puts new values into `.data`"),
        (operations.InnerGradient, None, "here forward computes a gradient"),
        (operations.HooksActivation, None, "here the gradient of a tensor gets a hook"),
        (operations.OwnGenerator, None, "numbers are drawn from a generator of its own"),
    ],
)
def test_another_module_as_written_is_refused_with_its_line(
    module: type[nn.Module], line: str | None, said: str
) -> None:
    found = find(as_written(module), FEW)
    assert found.verdict == "refused" and said in found.reason, found
    if line is not None:
        code, first = getsourcelines(module)
        number = first + [text.strip() for text in code].index(line)
        assert f"{getsourcefile(module)}, line {number}: " in found.reason, found


@pytest.mark.slow
@pytest.mark.parametrize("subject", written, ids=lambda subject: subject.name)
def test_every_module_as_written_is_equal_to_itself_or_refused(subject: TracedSubject) -> None:
    found = find(subject, FEW)
    assert found.right, found


def test_a_module_that_differs_from_its_layers_is_found() -> None:
    made = iter([weights.Net, operations.StraightThrough, weights.Net])
    found = find(TracedSubject("differs", lambda: next(made, operations.StraightThrough)(), vectors), FEW)
    assert found.verdict == DIFFERENT and "gradient of stem.weight" in found.reason, found


def as_written(module: type[nn.Module]) -> TracedSubject:
    (subject,) = (subject for subject in written if subject.constructor is module)
    return subject
