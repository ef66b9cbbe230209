"""Tests the CLDR corpus: its contents, what is left out, and that it is always the same."""

import multiprocessing
from pathlib import Path

import pytest
from run_files import bytes_of

from gpipe_cli.data.cldr import pairs as cldr
from gpipe_cli.data.cldr import source as cldr_source
from gpipe_cli.data.cldr.languages import LANGUAGES, corpus_size
from gpipe_cli.data.cldr.source import CorpusParameters, open_store
from gpipe_cli.data.cldr.strings import locale_strings, render
from gpipe_cli.data.prepared import in_processes
from gpipe_cli.data.source import no_report
from gpipe_cli.data.vocabulary import train_vocabulary
from gpipe_cli.errors import ConfigurationError

SMALL = ("es", "de", "ccp", "yrl")


@pytest.fixture(scope="module")
def small() -> dict[str, list[cldr.Pair]]:
    return {code: cldr.train_pairs(code, 400, seed=0) for code in SMALL}


def test_sizes_fall_evenly_on_a_log_scale_from_largest_to_smallest() -> None:
    sizes = [corpus_size(code, 30_000, 100) for code in LANGUAGES]
    assert (sizes[0], sizes[17], sizes[-1], sum(sizes)) == (30_000, 11_486, 100, 544_643)


def test_pairs_are_translations_in_plain_spaces_and_fewer_begin_alike(small: dict[str, list[cldr.Pair]]) -> None:
    odd = set("\u00a0\u202f\u2009\u200e\u200f\u061c")  # odd spaces and direction marks
    pairs = [pair for code in (*SMALL, "ar", "fr") for pair in small.get(code) or cldr.train_pairs(code, 400, seed=0)]
    assert not [pair for pair in pairs if odd & set(pair.source + pair.target) or pair.source == pair.target]
    assert cldr.train_pairs("de", 50, seed=0) == small["de"][:50]


@pytest.mark.parametrize("split", ["dev", "test"])
def test_no_held_out_english_is_trained_on_in_any_language(small: dict[str, list[cldr.Pair]], split: str) -> None:
    trained = {pair.target for pairs in small.values() for pair in pairs}
    held_out = {render(item, locale_strings("en")) for item in cldr.held_out_items(split, seed=0)}
    assert not trained & held_out


def test_dev_and_test_share_no_content() -> None:
    dev, test = ({cldr.content_key(item) for item in cldr.held_out_items(split, 0)} for split in ("dev", "test"))
    assert (len(dev), len(test), dev & test) == (300, 300, set())


def test_a_list_with_a_held_out_part_is_held_out() -> None:
    amounts = (("unit", str(number), "length-meter") for number in range(1, 10_000))
    amount = next(item for item in amounts if cldr.split_of(cldr.content_key(item)) == "dev")
    assert cldr.held_out(("list", "or", (amount, ("unit", "1", "mass-gram")))) != "train"


def test_a_name_that_means_two_things_is_left_out() -> None:
    # Thai writes "Polish" and "Poland" alike.
    names = cldr.unambiguous_inventory("th")
    assert locale_strings("th").names["language", "pl"] == locale_strings("th").names["territory", "PL"]
    assert "pl" not in names["language"] and "PL" not in names["territory"]


@pytest.mark.parametrize(
    ("code", "item"),
    [
        ("ccp", ("list", "or", (("name", "territory", "DE"), ("name", "territory", "FR")))),  # root: English "or"
        ("oc", ("relative", "3", "day", "past")),  # root: "-3 d"
        ("ta", ("date and time", "long", 730_000, 46_800)),  # root: "PM"
        ("ja", ("compact", "5000000")),
        ("yrl", ("money", "3", "no such currency")),
    ],
)
def test_babels_silent_fallbacks_are_missing_and_not_rendered(code: str, item: tuple[object, ...]) -> None:
    assert render(item, locale_strings(code)) is None


def test_the_vocabulary_error_names_a_size_that_works(small: dict[str, list[cldr.Pair]]) -> None:
    sentences = [text for pair in small["de"] for text in pair]
    with pytest.raises(ConfigurationError, match=r"use data\.vocabulary=(\d+)") as error:
        train_vocabulary(sentences, 20_000)
    largest = int(str(error.value).rpartition("use data.vocabulary=")[2].partition(",")[0])
    assert train_vocabulary(sentences, largest)


TINY = CorpusParameters(("de", "yrl"), largest=300, smallest=100, vocabulary=400, seed=0)


@pytest.mark.slow(2)
def test_a_store_is_the_same_bytes_by_any_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = open_store(TINY, str(tmp_path / "one process"), no_report).folder
    asked: list[int] = []
    monkeypatch.setattr(cldr_source, "SMALL", 0)
    monkeypatch.setattr(cldr_source, "usable_cores", lambda: 3)
    monkeypatch.setattr(cldr_source, "in_processes", lambda count: asked.append(count) or in_processes(count))
    assert bytes_of(open_store(TINY, str(tmp_path / "three"), no_report).folder) == bytes_of(alone)
    assert asked == [3]


@pytest.mark.slow(2)
def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    builders = [context.Process(target=open_store, args=(TINY, str(tmp_path), no_report)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(120)
    assert [builder.exitcode for builder in builders] == [0, 0]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [TINY.folder()]
