"""Tests the store against its text, a preparation that is killed, and the mini-batches made of it."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import parallel_folder
import pytest
from text_sources import in_small_pieces, sentences

from gpipe_cli.data.defects import Defects
from gpipe_cli.data.sampling import dealt, least_pairs, micro_batches, temperature_shares, width_of
from gpipe_cli.data.source import Batch, Report, no_report
from gpipe_cli.data.store import Store, StoreWriter, interleave, token_kind
from gpipe_cli.data.translation import PairSource
from gpipe_cli.errors import ConfigurationError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parallel_folder.opus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def store(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return in_small_pieces(root, tmp_path_factory.mktemp("cache"))


def test_the_pairs_lie_shuffled(store: Store) -> None:
    text = [pair.target for pair in parallel_folder.pairs_of("de", 300)]
    places = [text.index(target) for target in sentences(store, "de", 1) if target in text]
    assert len(places) > 200
    assert abs(np.corrcoef(places, np.arange(len(places)))[0, 1]) < 0.2


def test_a_store_is_made_again_only_when_a_file_has_changed(tmp_path: Path) -> None:
    root, reports = parallel_folder.opus(tmp_path / "text"), list[str]()
    first = in_small_pieces(root, tmp_path / "cache")
    in_small_pieces(root, tmp_path / "cache", 1, lambda text, *_: reports.append(text))
    assert reports == []
    parallel_folder.write(root / "sw-en" / "opus.sw-en-dev.sw", ["x"] * 20)
    assert in_small_pieces(root, tmp_path / "cache").folder != first.folder


def test_ids_over_two_bytes_are_stored_in_four(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (token_kind(range(65_536)), token_kind(range(9), range(65_537))) == (np.uint16, np.uint32)
    monkeypatch.setattr("gpipe_cli.data.store.token_kind", lambda *_: np.uint32)
    writer = StoreWriter(tmp_path)
    writer.add("de", *interleave([([1, 70_000], [3]), ([2], [4, 65_536])], np.uint32))
    writer.finish([], Defects())
    (tmp_path / "source.model").write_bytes((store.folder / "source.model").read_bytes())
    wide = Store(tmp_path)
    pairs = wide.locate(np.array([0, 0]), np.array([1, 0]))
    gathered = [[ids.tolist() for ids in side] for side in wide.gather(pairs)]
    assert gathered == [[[2], [1, 70_000]], [[4, 65_536], [3]]]


# -- mini-batches: nothing is lost or repeated, each is a sample, loads are balanced, shapes are few -----------------


Pair = tuple[tuple[int, ...], tuple[int, ...]]


class OfStore(PairSource):
    """Reads a store that is already there, with blocks of 16 and shards of 64 pairs."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        keys = {"batch_size": None, "batch_tokens": 300, "temperature": 1.0, "max_length": 96, "seed": 3}
        super().__init__(**{**keys, "evaluation_per_language": 3, **changes})
        self._folder = folder

    def prepare(self, report: Report) -> None:
        self._use(Store(self._folder))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = parallel_folder.opus(tmp_path_factory.mktemp("text"), sizes={"de": 300})
    return in_small_pieces(root, tmp_path_factory.mktemp("cache")).folder


def opened(folder: Path, **changes: Any) -> OfStore:
    source = OfStore(folder, **changes)
    source.prepare(no_report)
    return source


def pairs_in(batch: Batch) -> list[Pair]:
    """Returns source and target ids of every pair, without padding, in order."""
    found: list[Pair] = []
    for (source, _), (target,) in batch.micro_batches:
        for row, out in zip(source.tolist(), target.tolist(), strict=True):
            found.append((tuple(filter(None, row)), tuple(filter(None, out))))
    return found


def pairs_of_text(store: Store, code: str) -> list[Pair]:
    """Encodes each line of the text with the store's vocabularies, in a plain loop."""
    text = parallel_folder.pairs_of(code, parallel_folder.SIZES[code])
    sides = [
        [(*ids, 3) for ids in vocabulary.encode([pair[side] for pair in text])]
        for side, vocabulary in enumerate((store.source_vocabulary, store.target_vocabulary))
    ]
    return list(zip(*sides, strict=True))


def read_until(source: PairSource, pairs: int) -> list[Pair]:
    """Returns at least so many pairs."""
    found: list[Pair] = []
    for batch in source.train(None, 1, 0, 1):
        found += pairs_in(batch)
        if len(found) >= pairs:
            break
    return found


# --- every pair once


@pytest.mark.parametrize("size", [{"batch_tokens": 300}, {"batch_size": 7, "batch_tokens": None}], ids=str)
@pytest.mark.parametrize("chunks", [1, 3])
def test_every_pair_comes_once_per_epoch_as_in_a_plain_loop(size: dict[str, Any], chunks: int, alone: Path) -> None:
    source = opened(alone, **size)
    counts = Counter(read_until(source, chunks * source._chunk))
    wanted = Counter(pairs_of_text(Store(alone), "de"))
    epochs, rest = divmod(chunks * source._chunk, 300)
    assert epochs and sum(counts.values()) == epochs * 300 + rest
    assert set(counts) == set(wanted)  # shards of 64 and blocks of 16: none is lost at an end
    # Several sentences may have the same ids. In the epoch under way each has come once or not at all.
    assert all(epochs * n <= counts[pair] <= (epochs + 1) * n for pair, n in wanted.items())


# --- temperature


@pytest.mark.parametrize("temperature", [1.0, 5.0, float("inf")])
def test_languages_come_as_often_as_the_formula_says(temperature: float, store: Store) -> None:
    source = opened(store.folder, temperature=temperature, batch_size=9, batch_tokens=None)
    languages = {pair: code for code in parallel_folder.SIZES for pair in pairs_of_text(store, code)}
    read = read_until(source, 10 * source._chunk)
    counts = Counter(languages[pair] for pair in read)
    shares = temperature_shares(list(parallel_folder.SIZES.values()), temperature)
    for code, share in zip(parallel_folder.SIZES, shares, strict=True):
        assert abs(counts[code] - share * len(read)) < 0.02 * len(read)  # a few have the same ids in two languages


# --- shapes and balance


def lengths(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws lengths from a few words to the limit."""
    draw = np.random.default_rng(seed)
    target = np.clip(draw.lognormal(3.0, 0.6, count), 2, 96).astype(np.int64)
    return np.clip(target * draw.normal(1.2, 0.2, count), 2, 96).astype(np.int64), target


def deal(pairs: int, equal_pairs: bool, parts: int, chunks: int = 3) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Returns the source and target lengths in each micro-batch of chunks of 64 mini-batches of about `pairs` pairs."""
    made = []
    for seed in range(chunks):
        source, target = lengths(64 * pairs, seed)
        for groups in dealt(source, target, 64, equal_pairs):
            s, t = source[np.concatenate(groups)], target[np.concatenate(groups)]
            made.append([(s[at], t[at]) for at in micro_batches([len(group) for group in groups], parts)])
    return made


@pytest.mark.parametrize("size", [{"batch_tokens": 900}, {"batch_size": 48, "batch_tokens": None}], ids=str)
@pytest.mark.parametrize("M", [1, 4])
def test_a_mini_batch_is_a_sample_of_the_corpus(M: int, size: dict[str, Any], store: Store) -> None:
    targets = [
        np.concatenate([(out != 0).sum(1).numpy() for _, (out,) in batch.micro_batches])
        for batch in islice(opened(store.folder, **size).train(None, M, 0, 1), 64)
    ]
    corpus = np.concatenate(targets)
    assert np.mean([of.std() for of in targets]) > 0.9 * corpus.std()
    assert np.std([of.mean() for of in targets]) < 0.25 * corpus.std()


@pytest.mark.parametrize(("equal_pairs", "mean"), [(True, 1.12), (False, 1.1)])
@pytest.mark.parametrize(("pairs", "parts"), [(150, 4), (600, 4), (600, 8)])
def test_mini_batches_are_of_one_size_and_their_micro_batches_balanced_with_little_padding(
    pairs: int, parts: int, equal_pairs: bool, mean: float
) -> None:
    batches = deal(pairs, equal_pairs, parts)
    counts = [sum(len(target) for _, target in batch) for batch in batches]
    tokens = np.array([sum(target.sum() for _, target in batch) for batch in batches])
    assert {*counts} == {pairs} if equal_pairs else np.abs(tokens / tokens.mean() - 1).max() < 0.15
    assert min(counts) >= least_pairs(pairs)
    loads = np.array([[len(s) * (width_of(s.max()) + width_of(t.max())) for s, t in batch] for batch in batches])
    real = sum(int(source.sum() + target.sum()) for batch in batches for source, target in batch)
    assert loads.shape == (len(batches), parts) and 1 - real / loads.sum() < 0.2
    excess = loads.max(1) / loads.mean(1)
    assert pairs < 600 or (excess.mean() < mean and excess.max() < 1.6)


def test_too_few_tokens_for_the_parts_are_refused_before_training(store: Store) -> None:
    said = r"divided into 16 micro-batches .*: raise data\.batch_tokens or lower pipeline\.M"
    with pytest.raises(ConfigurationError, match=said):
        opened(store.folder).train(None, 8, 0, 2)
