"""Tests parallel text: under any name, in every layout; every defect is named with its file and line."""

import csv
import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import parallel_folder
import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po
from composed import composed
from hydra.utils import get_class
from inline_run import train_inline
from parallel_folder import corpus
from refusals import refusal_of
from run_files import bytes_of
from text_sources import in_small_pieces, own_sentencepiece, own_tokenizer, places, prepared, sentences

from gpipe_cli.data.defects import Defects
from gpipe_cli.data.lines import reading, texts_in
from gpipe_cli.data.parallel.folders import PairFiles, columns_of
from gpipe_cli.data.parallel.preparation import read_pieces, readable
from gpipe_cli.data.parallel.source import ParallelTextSource
from gpipe_cli.data.source import no_report
from gpipe_cli.data.store import Store
from gpipe_cli.errors import ConfigurationError

SMALL: dict[str, Any] = {"source_vocabulary": 300, "target_vocabulary": 300, "batch_tokens": 500, "held_out": 0.0}
Pairs = Sequence[tuple[str, str]]


def source(root: Path, **changes: Any) -> ParallelTextSource:
    return prepared(ParallelTextSource, root, {**SMALL, **changes})


def refusal(root: Path, **changes: Any) -> str:
    return refusal_of(prepared, ParallelTextSource, root, {**SMALL, **changes})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return parallel_folder.plain(tmp_path / "text", dev="dev")


@pytest.fixture
def opus(tmp_path: Path) -> Path:
    return parallel_folder.opus(tmp_path / "text")


def sides_read(made: ParallelTextSource, side: int = 0) -> list[str]:
    """Returns the training sentences of one side, sorted."""
    return sorted(text for code in made.sizes for text in sentences(made._store, code, side))


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    """Writes what two of OPUS' archives in Moses' format hold, unpacked into one folder."""
    root = tmp_path / "downloads"
    corpus(root / "Europarl.de-en", 0, 180)
    corpus(root / "WMT-News.de-en", 180, 300)
    for name in ("README", "LICENSE", "Europarl.de-en.xml", "Europarl.de-en.ids", "WMT-News.de-en.xml"):
        parallel_folder.write(root / name, ["<not a sentence/>"] * 180)
    return root


# --- layouts


def sides_of(pairs: Pairs) -> list[list[str]]:
    return [[pair[side] for pair in pairs] for side in (0, 1)]


def records(keys: tuple[str, str], below: bool = False) -> Callable[[Pairs], list[list[str]]]:
    def lines(pairs: Pairs) -> list[list[str]]:
        found = [dict(zip(keys, pair, strict=True)) for pair in pairs]
        return [[json.dumps({"id": 1, "translation": of} if below else of, ensure_ascii=False) for of in found]]

    return lines


CODES, NAMES = ("de", "en"), ("german", "english")
LAYOUTS: dict[str, tuple[Sequence[str], Callable[[Pairs], list[list[str]]], dict[str, Any]]] = {
    "OPUS-100": (("de-en/opus.de-en-train.de", "de-en/opus.de-en-train.en"), sides_of, {}),
    "OPUS, Moses": (("Europarl.de-en.de", "Europarl.de-en.en"), sides_of, {}),
    "a pair of files, .bz2": (("train.de.bz2", "train.en.bz2"), sides_of, {}),
    "a folder of a language, .gz": (("de/train.de.gz", "de/train.en.gz"), sides_of, {}),
    "any name": (("a.german", "a.english"), sides_of, {"train": {"de": [["a.german", "a.english"]]}}),
    "a table, .zst": (("de-en/train.tsv.zst",), lambda pairs: [["\t".join(pair) for pair in pairs]], {}),
    "a table of OPUS": (("Europarl.de-en.tsv",), lambda pairs: [["\t".join(pair) for pair in pairs]], {}),
    "a plain table": (("train.tsv",), lambda pairs: [["\t".join(pair) for pair in pairs]], {"pair": "de"}),
    "JSON lines, .xz": (("de-en/train.jsonl.xz",), records(CODES, below=True), {}),
    "JSON lines of two columns": (("de-en/train.json.gz",), records(CODES), {}),
    "JSON lines of named columns": (("de-en/train.ndjson",), records(NAMES), {"columns": NAMES}),
    "Parquet": (("de-en/train-00000-of-00001.parquet",), records(CODES, below=True), {}),
    "a JSON array": (("de-en/train.json",), records(CODES), {}),
    "a table with names": (("train.de-en.csv",), records(NAMES), {"columns": NAMES}),
    "a catalogue": (("locale/x.po",), records(CODES), {"train": {"de": ["locale/*.po"]}}),
    "a catalogue of gettext's": (("locale/de/LC_MESSAGES/django.po",), records(CODES), {}),
    "a translation memory": (("Memory.de-en.tmx",), records(CODES), {}),
    "a memory of any name": (("memory.tmx",), records(CODES), {}),
}  # fmt: skip


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Writes lines, or what they hold as a library of the format writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in lines] if lines[0].startswith("{") else []
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([{**row, "vector": [0.5]} for row in rows]), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".po":
        catalogue = Catalog("de")
        for row in rows:
            catalogue.add(row["en"], row["de"])
        with path.open("wb") as file:
            write_po(file, catalogue)
    elif path.suffix == ".tmx":
        path.write_text(memory(rows))
    else:
        parallel_folder.write(path, lines)


def memory(rows: Sequence[dict[str, str]]) -> str:
    units = (
        f'<tuv xml:lang="{name}"><seg><bpt i="1">&lt;b></bpt>{escape(text)}</seg></tuv>'
        for row in rows
        for name, text in row.items()
    )
    pairs = "".join(f"<tu>{one}{other}</tu>\n" for one, other in zip(units, units, strict=True))
    return f'<?xml version="1.0"?><tmx version="1.4"><header srclang="en"/><body>{pairs}</body></tmx>'


TEMPLATE = 'msgid ""\nmsgstr "charset=CHARSET\\n"\n"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\\n"\n\n'
ENTRY = '#, fuzzy\n#~ msgid "x"\n#~ msgstr "y"\n\nmsgctxt "a"\nmsgid "Y"\n"es"\nmsgstr "Jä"\n'
EXCEL = 'sep=;\r\n"de-DE";en-US\r\nJä;Yes\r\n'
MEMORY = """<tmx xmlns="urn:x"><tu><tuv xml:lang="de"><seg>Jä</seg></tuv><tuv xml:lang="de-CH"><seg>Jo</seg></tuv>
    <tuv xml:lang="EN-GB"><seg>Yes</seg></tuv></tu></tmx>"""
OTHERS_WRITE = [  # name, content and encoding of a file
    ("template.po", TEMPLATE + ENTRY, "utf-8"),
    ("mark.po", TEMPLATE + ENTRY, "utf-8-sig"),
    ("crlf.po", (TEMPLATE + ENTRY).replace("\n", "\r\n"), "utf-16"),
    ("torn.po", TEMPLATE + "<<<<<<< HEAD\n" + ENTRY, "utf-8"),
    ("excel.csv", EXCEL, "utf-8-sig"),
    ("unicode_text.csv", "DE\t EN\r\nJä\tYes\r\n", "utf-16"),
    ("bars.csv", 'id | de | en\n1 | "Jä" | Yes\n', "utf-8"),
    ("array.json", '\n [{"de": "Jä", "en": "Yes"}]', "utf-8-sig"),
    ("regions.tmx", MEMORY, "utf-8"),
]


@pytest.mark.parametrize(("name", "content", "encoding"), OTHERS_WRITE)
def test_a_file_as_other_programs_write_it_gives_its_one_pair(
    name: str, content: str, encoding: str, tmp_path: Path
) -> None:
    (path := tmp_path / name).write_bytes(content.encode(encoding))
    files = PairFiles("de", "train", path, None, columns_of(path, "de", "en"))
    lines = readable(files, next(read_pieces(files, 9)), found := Defects())
    assert lines == [(lines[0].number, "Jä", "Yes")] and not found.counts


def rows_of(path: Path) -> list[list[str]]:
    with reading(path) as file:
        return [texts_in(line.decode(), ("msgstr", "msgid"), "data.columns") for line in file]


def test_a_catalogue_is_read_by_its_forms(tmp_path: Path) -> None:
    catalogue = tmp_path / "de.po"
    catalogue.write_text(
        'msgid "one file"\nmsgid_plural "files"\nmsgstr[0] "eine Datei"\nmsgstr[1] "Dateien"\n\n'
        '#, fuzzy\nmsgid "guessed"\nmsgstr "geraten"\n\n#~ msgid "old"\n#~ msgstr "alt"\n'
    )
    forms = [["eine Datei", "one file"], ["Dateien", "files"]]
    assert rows_of(catalogue) == [*forms, ["", "guessed"]]
    with (tmp_path / "de.mo").open("wb") as file:
        write_mo(file, read_po(catalogue.open("rb")))
    assert rows_of(tmp_path / "de.mo") == forms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_sentences_and_names_a_defect_with_its_line(layout: str, tmp_path: Path) -> None:
    pairs: list[tuple[str, str]] = [(pair.source, pair.target) for pair in parallel_folder.pairs_of("de", 300)]
    pairs[40] = ("", pairs[40][1])
    files, lines_of, named = LAYOUTS[layout]
    for file, lines in zip(files, lines_of(pairs), strict=True):
        write_lines(tmp_path / "text" / file, lines)
    made = source(tmp_path / "text", **named)
    assert ("empty", Path(files[0]).name, 41) in places(made) and made.sizes == {"de": 299}
    corpus(tmp_path / "plain" / "train", 0, 300)
    plain = tmp_path / "plain" / "train.de"
    plain.write_text("".join(f"{source}\n" for source, _ in pairs))
    assert sides_read(made, 1) == sides_read(source(plain.parent), 1)


def test_languages_are_found_or_listed_and_a_missing_one_names_those_that_are_there(opus: Path) -> None:
    made = source(opus)
    assert made.sizes == parallel_folder.SIZES
    found = {(sample.language, sample.source, sample.reference) for sample in made.held_out("dev")}
    assert found == {(code, *pair) for code in made.sizes for pair in parallel_folder.pairs_of(code, 20, "dev")}
    assert source(opus, languages=["sw", "de"]).sizes == {"sw": 120, "de": 300}
    assert source(opus, pair="sw", source_vocabulary=150, target_vocabulary=150).sizes == {"sw": 120}
    assert "no training text from 'fr' into 'en', only from de, fi, sw" in refusal(opus, languages=["fr"])


def test_pairs_are_turned_by_their_names_and_a_catalogue_by_english(tmp_path: Path, root: Path) -> None:
    turned = source(root, target="de").held_out("dev")[0]
    assert (turned.language, turned.reference) == ("en", parallel_folder.pairs_of("de", 1, "dev")[0].source)
    pairs: Pairs = [(pair.source, pair.target) for pair in parallel_folder.pairs_of("de", 300)]
    write_lines(tmp_path / "po" / "de.po", records(CODES)(pairs)[0])
    write_lines(tmp_path / "tsv" / "de-en" / "train.tsv", ["\t".join(pair) for pair in pairs])
    for form in ("po", "tsv"):
        made = source(tmp_path / form, target="de")
        assert made.sizes == {"en": 300} and sides_read(made, 0) == sides_read(source(tmp_path / form), 1)
    (tmp_path / "po" / "de.po").rename(tmp_path / "po" / "german.po")
    assert """'data.train={xx: ["german.po"]}'""" in refusal(tmp_path / "po")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("memory.tmx", "test.tmx"),
        ("locale/de/LC_MESSAGES/django.po", "my-test.de.po"),
        ("train/Both.de-en.tmx", "test/Both.de-en.tmx"),
        ("de-en/train.tsv", "DevTest.de.po"),
        ("de-en/Testament.de-en.tsv", "de-en/newstest2014.de-en.tsv"),
    ],
)
def test_what_is_named_test_is_never_trained_on_whatever_its_format(train: str, test: str, tmp_path: Path) -> None:
    pairs: Pairs = [(pair.source, pair.target) for pair in parallel_folder.pairs_of("de", 320)]
    for name, of in ((train, pairs[:300]), (test, pairs[300:])):
        lines = ["\t".join(pair) for pair in of] if name.endswith(".tsv") else records(CODES)(of)[0]
        write_lines(tmp_path / "text" / name, lines)
    made = source(tmp_path / "text")
    assert made.sizes == {"de": 300} and {of.reference for of in made.held_out("test")} == {of for _, of in pairs[300:]}


def test_a_side_that_is_in_no_pair_is_told(opus: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train.bt.de", "train.bt.en", "newsroom.de"):
        (opus / name).write_text("eins\n")
    source(opus)
    assert "3 files are passed over (newsroom.de, train.bt.de, train.bt.en)" in caplog.text


@pytest.mark.parametrize("place", [None, "absent", "empty", "unknown"])
def test_a_root_without_text_says_what_was_expected(place: str | None, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    parallel_folder.write(tmp_path / "unknown" / "corpus.txt", ["a line"])
    with pytest.raises(ConfigurationError, match=r"data\.root.*xx-en/opus\.xx-en-train\.xx.*train\.tsv.*\.gz, \.zst"):
        ParallelTextSource(None if place is None else str(tmp_path / place)).prepare(no_report)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("train.de.gz", gzip.compress(b"a\n"), "one text twice"),
        ("train.de", "ja\n".encode("utf-16-be") * 300, "{root}/train.de, line 1: has a NUL byte"),
        ("train.de", b"\n" * 300, "no pair of lines has text on both sides"),
        ("train.de", b"", "{root}/train.de is empty"),
        ("train.tsv", b"a\tb\n", "train.tsv has no language in its name"),
        ("a.de-en.tmx", b"<tmx>\n<tu & />", "tmx: cannot be read (not well-formed (invalid token): line 2"),
        ("a.de-en.csv", b'de,en\n"' + b"a\n" * 99_999, "a.de-en.csv: cannot be read (field larger than field limit"),
        ("a.de-en.mo", b"\xde\x12\x04\x95" + b"\0\0\0\1" * 4, "a.de-en.mo: cannot be read ("),
    ],
    ids=["packed too", "UTF-16", "blank lines", "empty", "without language", "no XML", "an open quote", "cut off"],
)
def test_text_that_cannot_be_used_is_refused_by_its_name(file: str, content: bytes, said: str, root: Path) -> None:
    (root / file).write_bytes(content)
    assert said.format(root=root) in refusal(root)


def test_parquet_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    parallel_folder.write(tmp_path / "text" / "de-en" / "train.parquet", ["PAR1"])
    said = refusal(tmp_path / "text")
    assert "train.parquet is read by the pyarrow library: pip install 'gpipe-cli[parquet]'" in said


# --- several corpora, files that are named


def test_corpora_of_opus_are_one_training_set(downloads: Path, tmp_path: Path) -> None:
    made = source(downloads)
    assert made.sizes == {"de": 300} and places(made) == [("no_dev", "downloads", 0)]
    corpus(tmp_path / "whole" / "Both.de-en", 0, 300)
    assert sides_read(made, 1) == sides_read(source(tmp_path / "whole"), 1)
    spoil(downloads / "WMT-News.de-en.de", 7, b"")
    for side in ("de", "en"):
        parallel_folder.write(downloads / f"News-Test.de-en.{side}", ["never trained on"])
    made = source(downloads)
    assert made.sizes == {"de": 299} and ("empty", "WMT-News.de-en.de", 7) in places(made)


def test_the_number_of_processes_changes_no_byte_of_several_corpora(downloads: Path, tmp_path: Path) -> None:
    one, two = (in_small_pieces(downloads, tmp_path / f"{workers}", workers).folder for workers in (1, 2))
    assert bytes_of(one) == bytes_of(two) and len(Store(one).languages["de"].shards) == 5


def test_files_of_any_name_are_one_key_and_other_splits_are_found(tmp_path: Path, opus: Path) -> None:
    root = tmp_path / "named"
    corpus(root / "Europarl.de-en", 0, 100)
    corpus(root / "extra" / "a", 100, 150)
    corpus(root / "extra" / "b", 150, 200)
    corpus(root / "aligned", 200, 250, ("german", "english"))
    corpus(root / "corpora" / "de" / "news", 250, 300, ("txt", "txt.en"))
    (root / "corpora" / "en").mkdir()
    (root / "corpora" / "de" / "news.txt.en").rename(root / "corpora" / "en" / "news.txt")
    corpus(root / "newstest2019.de-en", 300, 320)
    files = ["Europarl.de-en.de", "extra/*.de", ["aligned.german", "aligned.english"], f"{root}/corpora/de/news.txt"]
    made = source(root, train={"de": [*files, "extra/a.de"]}, dev={"de": "newstest2019.de-en.de"})
    assert made.sizes == {"de": 300} and len(made.held_out("dev")) == 20 and made.prepared_defects == {}
    made = source(opus, train={"de": str(root / "Europarl.de-en.de")})
    assert made.sizes == {"de": 100} and len(made.held_out("dev")) == 20


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"de": ["Europarl.de"]}, "data.train.de=Europarl.de: there is no file"),
        ({"de": "*.fr"}, "data.train.de=*.fr: there is no file"),
        ({"de": "README"}, "has no 'de' in its name, by which the file in 'en' is found"),
        ({"de": "Europarl.de-en.en"}, "Europarl.en-en.en beside it"),
        ({"en": "Europarl.de-en.en"}, "'en' is data.target"),
        ({"de": ["Europarl.de-en.de", "Europarl.de-en.de.gz"]}, "are one text twice"),
    ],
)
def test_what_is_named_and_not_there_is_refused(train: dict[str, Any], said: str, downloads: Path) -> None:
    if "twice" in said:
        for side in ("de", "en"):
            parallel_folder.write(downloads / f"Europarl.de-en.{side}.gz", ["a"])
    assert said in refusal(downloads, train=train)


# --- defects


def spoil(path: Path, line: int, by: bytes) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = by
    path.write_bytes(b"\n".join(lines))


def spoil_both(root: Path, line: int, de: bytes, en: bytes) -> None:
    spoil(root / "train.de", line, de)
    spoil(root / "train.en", line, en)


LINES = {  # kind: what spoils line 7 of the sources, and what is said
    "undecodable": (b"caf\xe9", "is not UTF-8"),
    "empty": (b"  ", "source is empty"),
    "nul": (b"a\0b", "has a NUL byte"),
    "too_long": (b" ".join(b"%d" % n for n in range(60)), "is too long: "),
}


@pytest.mark.parametrize("split", ["train", "dev"])
@pytest.mark.parametrize("kind", LINES)
def test_a_bad_line_is_dropped_counted_and_named(kind: str, split: str, root: Path) -> None:
    whole = sides_read(source(root))
    spoil(root / f"{split}.de", 7, LINES[kind][0])
    made = source(root)
    assert places(made) == [(kind, f"{split}.de", 7)] and made.prepared_defects == {kind: 1}
    assert made.sizes == {"de": 300 - (split == "train")} and set(sides_read(made)) <= set(whole)
    assert f"{root}/{split}.de, line 7: {LINES[kind][1]}" in made._store.defects.first[kind]


def test_a_line_that_is_no_record_or_row_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    lines = records(CODES)(parallel_folder.pairs_of("de", 300))[0]
    lines[6], lines[9], lines[12] = '{"de": "torn', '{"de": "ja"}', '{"de": "a\\u0000b", "en": "c"}'
    parallel_folder.write(tmp_path / "text" / "de.jsonl", lines)
    named = {"train": {"de": "de.jsonl"}}
    made = source(tmp_path / "text", **named)
    assert places(made)[:2] == [("malformed", "de.jsonl", 7), ("nul", "de.jsonl", 13)]
    assert made.prepared_defects["malformed"] == 2
    wrong = refusal(tmp_path / "text", **named, columns=["src", "tgt"])
    assert "de.jsonl, line 1: has no text under 'src' (data.columns), only under: de, en" in wrong
    table = ["\t".join(pair) for pair in parallel_folder.pairs_of("de", 300)]
    parallel_folder.write(tmp_path / "tables" / "de-en" / "train.tsv", [*table[:4], "a\tb\tc", *table[5:]])
    assert ("malformed", "train.tsv", 5) in places(source(tmp_path / "tables"))


def test_files_of_different_lengths_are_refused_with_both_numbers(opus: Path) -> None:
    with (opus / "sw-en" / "opus.sw-en-train.en").open("a") as file:
        file.write("one line more\n")
    folder = f"{opus}/sw-en/opus.sw-en-train"
    assert f"{folder}.sw has 120 lines, {folder}.en has 121: they are read line by line" in refusal(opus)


def test_a_language_without_dev_files_has_a_share_of_its_pairs_held_out(opus: Path, tmp_path: Path) -> None:
    for path in [*opus.rglob("opus.sw-en-*.*"), *opus.rglob("opus.de-en-dev.*")]:
        path.unlink() if "train" not in path.name else None
    made = source(opus, held_out=0.2)
    held = {split: made.held_out(split) for split in ("dev", "test")}
    own = {of.language: [one.reference for one in held["dev"] if one.language == of.language] for of in held["dev"]}
    assert len(own["fi"]) == 20 and 15 < len(own["de"]) < 50 and not places(made)  # files of one's own come first
    in_test = Counter(of.language for of in held["test"])
    assert (in_test["de"], in_test["fi"]) == (20, 20) and len(own["sw"]) and in_test["sw"]
    left = {"de": len(own["de"]), "sw": len(own["sw"]) + in_test["sw"], "fi": 0}
    assert made.sizes == {code: size - left[code] for code, size in parallel_folder.SIZES.items()}
    again = source(opus, held_out=0.2, preparation_workers=2, cache_dir=str(tmp_path / "two"))
    assert bytes_of(again._store.folder) == bytes_of(made._store.folder)
    none = source(opus, held_out=1e-9)
    assert none.sizes == parallel_folder.SIZES and none.prepared_defects == {"no_dev": 2}


def test_dev_text_without_training_text_of_that_name_is_told(opus: Path, caplog: pytest.LogCaptureFixture) -> None:
    (opus / "sw-en" / "opus.sw-en-train.sw").rename(opus / "sw-en" / "opus.sw-en-train.swa")
    assert [*source(opus).sizes] == ["de", "fi", "swa"]
    assert "4 files are passed over (sw-en/opus.sw-en-dev.en, sw-en/opus.sw-en-dev.sw, " in caplog.text
    assert "are used; in all splits: found 1 no dev; such as" in caplog.text


def test_pairs_that_are_held_out_are_dropped_copied_ones_are_kept_and_both_are_counted(root: Path) -> None:
    for line, split in ((7, "dev"), (8, "test")):
        spoil_both(root, line, *((root / f"{split}.{side}").read_bytes().split(b"\n")[3] for side in ("de", "en")))
    spoil(root / "train.de", 9, (root / "dev.de").read_bytes().split(b"\n")[3])  # translated otherwise: another pair
    spoil_both(root, 10, b"one line", b"one line")
    made = source(root)
    assert sorted(places(made)) == [("copied", "train.de", 10), ("held_out", "train.de", 7)]
    assert made.sizes == {"de": 298} and made.prepared_defects == {"held_out": 2, "copied": 1}


# --- vocabularies


def test_each_side_has_a_vocabulary_of_its_size_or_both_share_one(root: Path) -> None:
    apart = source(root, target_vocabulary=200)._store
    assert (len(apart.source_vocabulary), len(apart.target_vocabulary)) == (300, 200)
    shared = source(root, shared_vocabulary=True)._store
    assert shared.target_vocabulary is shared.source_vocabulary
    assert "use one number for data.source_vocabulary" in refusal(root, shared_vocabulary=True, target_vocabulary=200)


@pytest.mark.parametrize("make", [own_sentencepiece, own_tokenizer])
def test_a_vocabulary_made_elsewhere_is_that_of_a_side_or_of_both(
    make: Callable[[Path, Sequence[str]], Path], root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [text for pair in parallel_folder.pairs_of("de", 300) for text in pair[:2]]
    file = make(tmp_path, texts)
    both = source(root, tokenizer=str(file))
    assert both.target_vocabulary is both.source_vocabulary
    assert f"ids of {file} come after 0 to 3: weights that another library" in caplog.text
    assert set(sides_read(both, 1)) == {pair.target for pair in parallel_folder.pairs_of("de", 300)}
    read = [inputs[0].flatten() for batch in islice(both.train(None, 1, 0, 1), 9) for inputs, _ in batch.micro_batches]
    ids = np.concatenate(read)
    assert {0, 3} == set(ids[ids < 4].tolist())  # padding and the end
    (tmp_path / "run").mkdir()
    both.keep_vocabularies(tmp_path / "run" / "vocabulary")
    again = source(root, tokenizer=str(tmp_path / "run"), shared_vocabulary=True)
    assert again.encode(texts[:9]) == both.encode(texts[:9])
    apart = source(root, tokenizer=[None, str(file)], source_vocabulary=150)
    assert len(apart.source_vocabulary) == 150 and apart.decode(both.encode(texts[:1])[0]) == texts[0]
    said = refusal(root, tokenizer=[None, str(file)], shared_vocabulary=True)
    assert "data.shared_vocabulary=true is one vocabulary for both sides" in said and "one data.tokenizer" in said
    said = refusal(root, tokenizer=str(file), target_vocabulary=20)
    assert re.search(r"data\.target_vocabulary=20, but data\.tokenizer=.* has ids up to \d+: use", said)


def test_a_vocabulary_may_be_as_small_as_its_text_and_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"source_vocabulary": 9000, "target_vocabulary": 9000}
    for _ in range(2):
        caplog.clear()
        made = source(root, smaller_vocabulary=True, **sizes)._store
        pieces = f"{len(made.target_vocabulary):,} pieces"
        assert f"data.target_vocabulary=9000, but the text supports {pieces}" in caplog.text
    assert made.target_vocabulary.decode([8999, 5]) == made.target_vocabulary.decode([5])  # the model knows more ids


MARKS = "你好，世界！（是）：“好”？ 20 m² ½ … ™ ﬁn می\u200cخواهم 10\u202f000\u00a0€"


@pytest.mark.parametrize("kind", ["parallel_text", "text"])
def test_texts_are_learnt_as_they_are_written_unless_a_rule_is_named(kind: str, tmp_path: Path) -> None:
    lines = [f"{one} {other}" for one in MARKS.split(" ") for other in MARKS.split(" ")] * 3
    parallel_folder.write(tmp_path / "text" / "train.de", lines)
    parallel_folder.write(tmp_path / "text" / "train.en", lines)
    parallel_folder.write(tmp_path / "text.txt", lines)
    words = [f"data={kind}", f"data.root={tmp_path / ('text.txt' if kind == 'text' else 'text')}"]
    keys = ["vocabulary"] if kind == "text" else ["source_vocabulary", "target_vocabulary"]
    words += [*(f"data.{key}=90" for key in keys), "data.character_coverage=1.0", "data.held_out=0.1"]
    words += ["data.document=line", "data.sequence_length=8"] if kind == "text" else []
    for rule, same in (("identity", True), ("nmt_nfkc", False)):
        more = [] if same else [f"data.normalization={rule}"]
        section = composed("model=transformer_lm" if kind == "text" else "model=transformer", *words, *more)["data"]
        assert section.pop("normalization") == rule
        target = get_class(section.pop("_target_"))
        made = target(**{**section, "normalization": rule, "cache_dir": str(tmp_path / "cache")})
        made.prepare(no_report)
        assert (made.decode(made.target_vocabulary.encode([MARKS])[0]) == MARKS) == same
    assert made.target_vocabulary.encode(["a\tb"]) == made.target_vocabulary.encode(["a b"])


def test_vocabularies_that_do_not_fit_are_told_together_by_our_keys_alone(root: Path) -> None:
    too_many = r"data\.source_vocabulary=9000, but this corpus supports \d+ pieces: use data\.source_vocabulary=\d+.*\n"
    too_few = r"data\.target_vocabulary=8, but the characters .* need \d+ pieces: use data\.target_vocabulary=\d+"
    message = refusal(root, source_vocabulary=9000, target_vocabulary=8)
    assert re.match(too_many + too_few, message) and not re.search("--|required_chars|src/", message)


# --- a run


def test_what_was_left_out_is_said_once_and_counted_in_every_run(root: Path, tmp_path: Path) -> None:
    spoil(root / "train.de", 7, b"")
    spoil_both(root, 8, b"one line", b"one line")
    for run in ("first", "from the cache"):
        words = ["debug=tiny", "data=parallel_text", f"data.root={root}", f"data.cache_dir={tmp_path}"]
        summary, events = train_inline(tmp_path / run, *words, "trainer.steps=1", "task.generation=null")
        assert summary["data_defects"] == {"empty": 1, "copied": 1}
        said = [event["text"] for event in events if event["kind"] == "warning"]
        counts = (
            "parallel text: 299 of 300 training pairs are used; in all splits: dropped 1 empty; kept 1 copied; such as "
        )
        counts += f"{root}/train.de, line 7: source is empty"
        assert said == [counts]
        assert not [event for event in events if event["kind"] == "preparation" and event["done"] > event["total"] > 0]
