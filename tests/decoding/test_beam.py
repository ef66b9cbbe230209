"""Tests beam search against an exhaustive search, against a plain loop, and through the pipeline at every K."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from beam_jobs import BOS, EOS, build, log_probabilities, sentences, settings, through_pipeline
from torch import Tensor

from gpipe_cli.cpu import as_worker
from gpipe_cli.decoding.beam import BeamSearch, Hypothesis
from gpipe_cli.launch.supervisor import Job, launch

END, VOCABULARY = 0, 4
Model = Callable[[tuple[int, ...]], Tensor]  # the tokens so far to the log-probabilities of the next one


def model_of(seed: int) -> Model:
    """Makes a small language model: random probabilities that depend on the preceding tokens alone."""

    @cache
    def next_token(prefix: tuple[int, ...]) -> Tensor:
        return torch.tensor([random.Random(str((seed, prefix, t))).gauss(0, 1.5) for t in range(4)]).log_softmax(0)

    return next_token


def search(models: Sequence[Model], limits: Sequence[int], beam: int, exponent: float) -> list[Hypothesis]:
    """Drives a `BeamSearch` over sentences that each have a model of their own."""
    state = BeamSearch(torch.tensor(limits), beam, exponent, END)
    rows: list[tuple[Model, tuple[int, ...]]] = [(model, ()) for model in models]
    while rows:
        going_on = state.advance(torch.stack([model(prefix) for model, prefix in rows]))
        parents, tokens = going_on.parents.tolist(), going_on.tokens.tolist()
        rows = [(rows[p][0], (*rows[p][1], t)) for p, t in zip(parents, tokens, strict=True)]
    return state.best()


def log_probability(model: Model, tokens: Sequence[int]) -> float:
    return sum(float(model(tuple(tokens[:i]))[token]) for i, token in enumerate(tokens))


def all_hypotheses(limit: int) -> list[tuple[int, ...]]:
    """Returns every token sequence of at most ``limit`` tokens, the end mark included."""
    bodies = (body for n in range(limit) for body in product(range(1, VOCABULARY), repeat=n))
    return [(*body, END) for body in bodies]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.5])
def test_a_wide_enough_beam_finds_what_an_exhaustive_search_finds(exponent: float) -> None:
    models, limits = [model_of(seed) for seed in range(12)], [2, 3, 4] * 4
    found = search(models, limits, beam=3**4, exponent=exponent)
    for model, limit, hypothesis in zip(models, limits, found, strict=True):
        scores = {y: log_probability(model, y) / ((len(y) + 5) / 5) ** exponent for y in all_hypotheses(limit)}
        assert (*hypothesis.tokens, END) == max(scores, key=scores.__getitem__)
        assert hypothesis.log_probability == pytest.approx(log_probability(model, (*hypothesis.tokens, END)), abs=1e-4)


def test_a_beam_of_one_is_greedy() -> None:
    models = [model_of(seed) for seed in range(40)]
    found = search(models, [6] * 40, beam=1, exponent=0.5)
    for model, hypothesis in zip(models, found, strict=True):
        tokens: list[int] = []
        while len(tokens) < 6 and END not in tokens:
            tokens.append(int(model(tuple(tokens)).argmax()))
        assert hypothesis.tokens == [token for token in tokens if token != END]


def test_of_equal_continuations_the_first_go_on() -> None:
    state = BeamSearch(torch.tensor([9]), 3, 0.5, eos_id=5)
    uniform = torch.zeros(1, 700).log_softmax(-1)
    going_on = state.advance(uniform)
    assert (going_on.parents.tolist(), going_on.tokens.tolist()) == ([0, 0, 0], [0, 1, 2])
    going_on = state.advance(uniform.expand(3, -1))
    assert (going_on.parents.tolist(), going_on.tokens.tolist()) == ([0, 0, 0], [0, 1, 2])


def test_sentences_do_not_touch_each_other() -> None:
    models, limits = [model_of(seed) for seed in range(20)], [1 + seed % 7 for seed in range(20)]
    together = search(models, limits, beam=3, exponent=0.5)
    assert together == [search([model], [limit], 3, 0.5)[0] for model, limit in zip(models, limits, strict=True)]


# -- through the pipeline --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Computes with one thread, as workers do: the number of threads changes the last bits."""
    with as_worker(1):
        yield


@pytest.fixture(scope="module")
def reference() -> list[Hypothesis]:
    """Returns the translations with beam 4 and one cell."""
    found = through_pipeline(1, 4, settings(), sentences())
    distinct, lengths = {tuple(h.tokens) for h in found}, {len(h.tokens) for h in found}
    assert len(distinct) > 5 and len(lengths) > 3, "the model says the same to everything: the tests would see nothing"
    return found


def test_caches_padding_and_groups_change_no_translation(reference: list[Hypothesis]) -> None:
    layers = build()
    for source, cached in zip(sentences(), reference, strict=True):
        state = BeamSearch(torch.tensor([settings().longest(len(source))]), 4, 0.5, EOS)
        prefixes = torch.tensor([[BOS]])
        while len(prefixes):
            parents, tokens = state.advance(log_probabilities(layers, source, prefixes))
            prefixes = torch.cat((prefixes[parents], tokens[:, None]), 1)
        assert cached.tokens == state.best()[0].tokens
        assert cached.log_probability == pytest.approx(state.best()[0].log_probability, rel=1e-4)


@pytest.mark.parametrize("K", [2, 5, 15])
def test_every_K_gives_the_same_bits(K: int, reference: list[Hypothesis]) -> None:
    assert through_pipeline(K, 4, settings(), sentences()) == reference


@pytest.mark.parametrize(
    ("K", "workers", "processes"),
    [(4, 3, 3), pytest.param(2, 2, 4, marks=pytest.mark.slow)],
    ids=["3 workers", "2 replicas"],
)
def test_workers_of_their_own_give_the_same_bits(
    K: int, workers: int, processes: int, tmp_path: Path, reference: list[Hypothesis]
) -> None:
    config = {"K": K, "beam": 4, "workers": workers}
    job = Job(tmp_path, processes, "beam_jobs:translate", config, preload=("torch", "beam_jobs"))
    found = launch(job, lambda event: None)
    assert [Hypothesis(*of) for of in found] == reference and {of.cut for of in reference} == {True, False}


def test_a_translation_is_no_longer_than_its_source_allows() -> None:
    chosen = settings(length_ratio=1.0, length_extra=0)
    found = through_pipeline(1, 2, chosen, sentences())
    assert all(len(h.tokens) <= len(source) for h, source in zip(found, sentences(), strict=True))
    assert any(len(h.tokens) == len(source) for h, source in zip(found, sentences(), strict=True))
