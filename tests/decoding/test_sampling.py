"""Tests texts that are continued: against a plain loop, with and without caches, the same for every K; the draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from beam_jobs import CPU, decoder_of
from torch import Tensor

from gpipe_cli.config import SamplingSettings
from gpipe_cli.decoding.beam import Hypothesis
from gpipe_cli.decoding.sampling import ContinuationForm, Prompt, Sampling
from gpipe_cli.distributed.step_message import BatchShape
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.pipeline.cell import BuiltLayer, build_layer

END, VOCABULARY, LENGTH = 3, 17, 8
PROMPTS = [[END, 5, 9], [END], [END, 4, 4, 8, 16], [END, 7, 5], [END, 11, 12]]


@pytest.fixture(scope="module", params=["sinusoids", "rotary"])
def layers(request: pytest.FixtureRequest) -> list[BuiltLayer]:
    """Builds a language model that does not say the same to everything."""
    builders = transformer_lm(L=2, H=32, A=1, vocabulary=VOCABULARY, d_model=16, positions=request.param)
    built = [BuiltLayer(i, b.name, build_layer(b, i, 5, CPU).eval()) for i, b in enumerate(builders)]
    with torch.no_grad():
        for layer in built:
            for parameter in layer.module.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(1.3)
    return built


def next_token(layers: Sequence[BuiltLayer], ids: Sequence[int]) -> Tensor:
    values: Any = torch.tensor([list(ids)])
    with torch.no_grad():
        for layer in layers:
            values = layer.module(values)
    return torch.as_tensor(values[0, -1].double().log_softmax(-1))


def continued(
    layers: Sequence[BuiltLayer], K: int, settings: SamplingSettings, window: int | None = None
) -> list[Hypothesis]:
    prompts = [Prompt(ids, n, sample) for n, ids in enumerate(PROMPTS) for sample in range(settings.samples)]
    form = ContinuationForm(settings, END, window)
    return decoder_of(layers, K, form, BatchShape((2,), (2,))).decode(prompts)


@pytest.mark.parametrize("window", [None, 20])
def test_greedy_is_the_most_probable_token_of_a_plain_loop(layers: list[BuiltLayer], window: int | None) -> None:
    found = continued(layers, 3, SamplingSettings(LENGTH, temperature=0), window)
    assert len({tuple(one.tokens) for one in found}) > 2
    for ids, hypothesis in zip(PROMPTS, found, strict=True):
        said, total = list(ids), 0.0
        while len(said) - len(ids) < LENGTH:
            probabilities = next_token(layers, said)
            said.append(int(probabilities.argmax()))
            total += float(probabilities.max())
            if said[-1] == END:
                break
        assert hypothesis.tokens == [token for token in said[len(ids) :] if token != END]
        assert hypothesis.log_probability == pytest.approx(total, abs=1e-4)


def test_beyond_the_window_the_last_tokens_count(layers: list[BuiltLayer]) -> None:
    (*_, found) = continued(layers, 2, SamplingSettings(LENGTH, temperature=0), window=4)
    said = list(PROMPTS[-1])
    for token in found.tokens:
        assert int(next_token(layers, said[-4:]).argmax()) == token
        said.append(token)


@pytest.mark.parametrize("window", [None, 20])
def test_samples_are_the_same_for_every_cut_and_differ_by_seed(layers: list[BuiltLayer], window: int | None) -> None:
    settings = SamplingSettings(LENGTH, temperature=1.5, top_p=0.95, samples=3, seed=1)
    found = [continued(layers, K, settings, window) for K in (1, 2, 4)]
    assert found[0] == found[1] == found[2]
    assert len({tuple(one.tokens) for one in found[0]}) > 2 * len(PROMPTS) and len(found[0]) == 3 * len(PROMPTS)
    other = SamplingSettings(LENGTH, temperature=1.5, top_p=0.95, samples=3, seed=2)
    assert continued(layers, 1, other, window) != found[0]


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3, 0.01 / 0.3]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"temperature": 0}, [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_tokens_are_drawn_by_their_shares(changes: dict[str, Any], shares: list[float]) -> None:
    rows = 4000
    targets = torch.stack([torch.arange(rows), torch.zeros(rows), torch.zeros(rows)], 1).long()
    search = Sampling(targets, SamplingSettings(1, **changes), eos_id=9)
    search.advance(torch.tensor([[0.2, 0.4, 0.1, 0.3]] * rows, dtype=torch.float64).log())
    counts = Counter(hypothesis.tokens[0] for hypothesis in search.best())
    for token, share in zip((1, 3, 0, 2), shares, strict=True):
        assert counts[token] / rows == pytest.approx(share, abs=4 * (share * (1 - share) / rows) ** 0.5)
