"""Tests beam search against an exhaustive search, continued texts against a plain loop, both through the pipeline."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from composed import checked
from torch import Tensor

from gpipe_cli.config import SamplingSettings
from gpipe_cli.cpu import as_worker
from gpipe_cli.decoding.beam import BeamSearch, Hypothesis
from gpipe_cli.decoding.decoding import Decoder, Form, SpecialTokens, TranslationForm
from gpipe_cli.decoding.sampling import ContinuationForm, Prompt, Sampling
from gpipe_cli.distributed.pipeline import WorkerPipeline
from gpipe_cli.distributed.step_message import BatchShape
from gpipe_cli.distributed.world import World
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.models.transformer import transformer
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.partition.cut import Cut
from gpipe_cli.pipeline.cell import BuiltLayer, build_layer
from gpipe_cli.tasks.base import GenerationSettings
from gpipe_cli.tasks.translation import TranslationTask

CPU = torch.device("cpu")
PAD, BOS, EOS, PIECES = 0, 2, 3, 13
SHAPE = {"L": 2, "H": 32, "A": 1, "d_model": 16, "source_vocabulary": PIECES, "target_vocabulary": PIECES}
ALONE = World(0, 1, 1, CPU, CPU, None, None, None)


def build() -> list[BuiltLayer]:
    """Builds the whole model, the same in every process."""
    return spread(transformer(**SHAPE), 3.0)  # type: ignore[arg-type]


def spread(builders: Sequence[LayerBuilder], factor: float) -> list[BuiltLayer]:
    """Builds layers with larger weights: a model that was never trained would otherwise say the same to everything."""
    layers = [BuiltLayer(i, b.name, build_layer(b, i, 5, CPU).eval()) for i, b in enumerate(builders)]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.module.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(factor)
    return layers


def sentences(count: int = 11) -> list[list[int]]:
    """Returns sources of 2 to 8 tokens, each with its end mark."""
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 8, (count,), generator=random).tolist()
    return [[*torch.randint(4, PIECES, (n,), generator=random).tolist(), EOS] for n in lengths]


def settings(**changes: Any) -> GenerationSettings:
    return GenerationSettings(**{"per_language": 1, "per_language_at_end": 1, "group": 3, "max_length": 9, **changes})


def through_pipeline(
    K: int, beam: int, chosen: GenerationSettings, sources: Sequence[Sequence[int]], world: World = ALONE
) -> list[Hypothesis]:
    """Decodes with K cells over the workers of ``world``, three groups in flight."""
    form = TranslationForm(TranslationTask(pad_id=PAD), chosen, SpecialTokens(BOS, EOS, PAD))
    decoder = decoder_of(build(), K, form, BatchShape((2, 2), (2,)), world)
    return decoder.decode(sources if world.reads_data else [], beam)


def decoder_of(layers: Sequence[BuiltLayer], K: int, form: Form, shape: BatchShape, world: World = ALONE) -> Decoder:
    """Makes a decoder with K cells over the workers of ``world``, three groups in flight."""
    placement = tuple(k * world.workers // K for k in range(K))
    sizes = [len(part) for part in torch.arange(len(layers)).tensor_split(K)]
    builders = [LayerBuilder(layer.name, lambda layer=layer: layer.module) for layer in layers]
    cut = Cut(sizes, placement, [], 0, [{} for _ in layers])
    config = checked(f"pipeline.K={K}", "pipeline.M=3").settings.pipeline
    pipeline = WorkerPipeline(builders, cut, config, TranslationTask(pad_id=PAD), shape, world)
    for cell in pipeline.cells:
        cell.train(False)
    return Decoder(pipeline, form)


def log_probabilities(layers: Sequence[BuiltLayer], source: Sequence[int], prefixes: Tensor) -> Tensor:
    """Returns those of the next token after each prefix [rows, t], by the whole model without cache or padding."""
    values: Any = (torch.tensor([list(source)] * len(prefixes)), prefixes)
    with torch.no_grad():
        for layer in layers:
            values = layer.module(values)
    return TranslationTask(pad_id=PAD).log_probabilities(values)


# -- beam search -----------------------------------------------------------------------------------------------------


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


def test_a_translation_is_no_longer_than_its_source_allows() -> None:
    chosen = settings(length_ratio=1.0, length_extra=0)
    found = through_pipeline(1, 2, chosen, sentences())
    assert all(len(h.tokens) <= len(source) for h, source in zip(found, sentences(), strict=True))
    assert any(len(h.tokens) == len(source) for h, source in zip(found, sentences(), strict=True))


# -- texts that are continued ----------------------------------------------------------------------------------------


STOP, WORDS, LENGTH = 3, 17, 8
PROMPTS = [[STOP, 5, 9], [STOP], [STOP, 4, 4, 8, 16], [STOP, 7, 5], [STOP, 11, 12]]


@pytest.fixture(scope="module", params=["sinusoids", "rotary"])
def layers(request: pytest.FixtureRequest) -> list[BuiltLayer]:
    """Builds a language model that does not say the same to everything."""
    return spread(transformer_lm(L=2, H=32, A=1, vocabulary=WORDS, d_model=16), 1.3)


def next_token(layers: Sequence[BuiltLayer], ids: Sequence[int]) -> Tensor:
    values: Any = torch.tensor([list(ids)])
    with torch.no_grad():
        for layer in layers:
            values = layer.module(values)
    return torch.as_tensor(values[0, -1].double().log_softmax(-1))


def continued(layers: list[BuiltLayer], K: int, how: SamplingSettings, window: int | None = None) -> list[Hypothesis]:
    prompts = [Prompt(ids, n, sample) for n, ids in enumerate(PROMPTS) for sample in range(how.samples)]
    form = ContinuationForm(how, STOP, window)
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
            if said[-1] == STOP:
                break
        assert hypothesis.tokens == [token for token in said[len(ids) :] if token != STOP]
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
