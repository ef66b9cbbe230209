"""Tests parallel text under any name: as it is downloaded, or named by data.train; several corpora are one set."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import parallel_folder
import pytest
from inline_run import train_inline
from preparation_jobs import prepare
from run_files import bytes_of
from text_sources import defects, places, prepared, refusal_of

from gpipe_cli.data.parallel.source import ParallelTextSource
from gpipe_cli.data.source import no_report

SMALL: dict[str, Any] = {"source_vocabulary": 300, "target_vocabulary": 300, "batch_tokens": 500}


def source(root: Path, **changes: Any) -> ParallelTextSource:
    return prepared(ParallelTextSource, root, {**SMALL, **changes})


def refusal(root: Path, **changes: Any) -> str:
    return refusal_of(ParallelTextSource, root, {**SMALL, **changes})


def corpus(stem: Path, first: int, last: int, sides: tuple[str, str] = ("de", "en")) -> Path:
    """Writes STEM.de beside STEM.en: German training pairs from one number to another."""
    pairs = parallel_folder.pairs_of("de", last)[first:]
    for column, side in enumerate(sides):
        parallel_folder.write(stem.with_name(f"{stem.name}.{side}"), [pair[column] for pair in pairs])
    return stem


def opus_downloads(root: Path) -> Path:
    """Writes what two of OPUS' archives in Moses' format hold, unpacked into one folder."""
    corpus(root / "Europarl.de-en", 0, 180)
    corpus(root / "WMT-News.de-en", 180, 300)
    for name in ("README", "LICENSE", "Europarl.de-en.xml", "Europarl.de-en.ids", "WMT-News.de-en.xml"):
        parallel_folder.write(root / name, ["<not a sentence/>"] * 180)
    return root


# --- found by themselves


def test_corpora_of_opus_are_found_by_themselves_and_are_one_training_set(tmp_path: Path) -> None:
    root = opus_downloads(tmp_path / "text")
    made = source(root)
    assert made.sizes == {"de": 300} and places(made) == [("no_dev", "text", 0)]
    assert defects(made)["corpora"] == {
        "de": {f"{root}/Europarl.de-en.de": [180, 180], f"{root}/WMT-News.de-en.de": [120, 120]}
    }
    parallel_folder.write(root / "News-Test.de-en.de", ["never trained on"])
    parallel_folder.write(root / "News-Test.de-en.en", ["never trained on"])
    assert source(root).sizes == {"de": 300}


def test_a_defect_of_one_corpus_is_named_with_its_file_and_line_and_counted_there(tmp_path: Path) -> None:
    root = opus_downloads(tmp_path / "text")
    lines = (root / "WMT-News.de-en.de").read_text().splitlines()
    (root / "WMT-News.de-en.de").write_text("\n".join([*lines[:6], "", *lines[7:]]) + "\n")
    made = source(root)
    assert made.sizes == {"de": 299} and ("empty", "WMT-News.de-en.de", 7) in places(made)
    assert defects(made)["corpora"]["de"][f"{root}/WMT-News.de-en.de"] == [119, 120]


def test_several_corpora_make_the_store_of_one_text_in_their_order(tmp_path: Path) -> None:
    parts, whole = opus_downloads(tmp_path / "parts"), tmp_path / "whole"
    corpus(whole / "Both.de-en", 0, 300)
    stores = [source(root)._store for root in (parts, whole)]
    sentences = []
    for store in stores:
        ids, lengths = store.gather(store.locate(np.zeros(300, np.int64), np.arange(300)))[1]
        rows = np.split(ids, np.cumsum(lengths)[:-1])
        sentences.append(sorted(store.target_vocabulary.decode(row.tolist()) for row in rows))
    assert sentences[0] == sentences[1]


def test_the_number_of_processes_changes_no_byte_of_several_corpora(tmp_path: Path) -> None:
    root = opus_downloads(tmp_path / "text")
    one, two = (prepare(root, tmp_path / f"{workers}", workers, no_report).folder for workers in (1, 2))
    assert bytes_of(one) == bytes_of(two) and len(list((one / "train").glob("de-*.tokens.npy"))) == 5


LAYOUTS = {  # the file that holds German, and the one beside it
    "OPUS-100": ("de-en/opus.de-en-train.de", "de-en/opus.de-en-train.en"),
    "OPUS, Moses": ("Europarl.de-en.de", "Europarl.de-en.en"),
    "a pair of files, .bz2": ("train.de.bz2", "train.en.bz2"),
    "a folder of a language, .gz": ("de/train.de.gz", "de/train.en.gz"),
    "any name": ("corpus.german", "corpus.english"),
    "a table, .zst": ("de-en/train.tsv.zst",),
    "a table of OPUS": ("Europarl.de-en.tsv",),
    "JSON lines, .xz": ("de-en/train.jsonl.xz",),
    "Parquet": ("de-en/train-00000-of-00001.parquet",),
}


def write_layout(root: Path, files: Sequence[str], pairs: Sequence[tuple[str, str]]) -> None:
    paths = [root / file for file in files]
    if len(paths) == 2:
        for path, side in zip(paths, zip(*pairs, strict=True), strict=True):
            parallel_folder.write(path, side)
    elif ".tsv" in files[0]:
        parallel_folder.write(paths[0], ["\t".join(pair) for pair in pairs])
    elif ".json" in files[0]:
        parallel_folder.write(paths[0], lines_of([{"translation": {"de": de, "en": en}} for de, en in pairs]))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        paths[0].parent.mkdir(parents=True)
        rows = [{"translation": {"de": de, "en": en}} for de, en in pairs]
        parquet.write_table(pyarrow.Table.from_pylist(rows), paths[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_defect_is_named_with_its_file_and_line_in_every_layout(layout: str, tmp_path: Path) -> None:
    pairs: list[tuple[str, str]] = [(pair.source, pair.target) for pair in parallel_folder.pairs_of("de", 300)]
    pairs[40] = ("", pairs[40][1])
    write_layout(tmp_path / "text", LAYOUTS[layout], pairs)
    named = {"train": {"de": [LAYOUTS[layout]]}} if layout == "any name" else {}
    made, file = source(tmp_path / "text", **named), Path(LAYOUTS[layout][0]).name
    assert ("empty", file, 41) in places(made) and made.sizes == {"de": 299}
    said = refusal(tmp_path / "text", **named, on_defect={"empty": "refuse"})
    assert f"{file}, line 41: source is empty" in said


# --- named


def test_files_of_any_name_are_one_key(tmp_path: Path) -> None:
    root = tmp_path / "text"
    corpus(root / "Europarl.de-en", 0, 100)
    corpus(root / "extra" / "a", 100, 150)
    corpus(root / "extra" / "b", 150, 200)
    corpus(root / "aligned", 200, 250, ("german", "english"))
    corpus(root / "corpora" / "de" / "news", 250, 300, ("txt", "txt.en"))
    (root / "corpora" / "en").mkdir()
    (root / "corpora" / "de" / "news.txt.en").rename(root / "corpora" / "en" / "news.txt")
    corpus(root / "newstest2019.de-en", 300, 320)
    train = [
        "Europarl.de-en.de",
        "extra/*.de",
        ["aligned.german", "aligned.english"],
        str(root / "corpora/de/news.txt"),
    ]
    made = source(root, train={"de": [*train, "extra/a.de"]}, dev={"de": "newstest2019.de-en.de"})
    assert (
        made.sizes == {"de": 300} and [used for used, _ in defects(made)["corpora"]["de"].values()] == [100] + [50] * 4
    )
    assert len(made.held_out("dev")) == 20 and made.prepared_defects == {}


def test_a_split_that_is_not_named_is_found_in_the_folder(tmp_path: Path) -> None:
    root = parallel_folder.opus(tmp_path / "text")
    corpus(tmp_path / "more", 300, 400)
    made = source(root, train={"de": str(tmp_path / "more.de")})
    assert made.sizes == {"de": 100} and len(made.held_out("dev")) == 20


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"de": ["Europarl.de"]}, "data.train.de=Europarl.de: there is no file"),
        ({"de": "*.fr"}, "data.train.de=*.fr: there is no file"),
        ({"de": "README"}, "has no 'de' in its name, by which the file in 'en' is found"),
        ({"de": "Europarl.de-en.en"}, "Europarl.en-en.en beside it"),
        ({"en": "Europarl.de-en.en"}, "'en' is data.target"),
    ],
)
def test_what_is_named_and_not_there_is_refused(train: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(opus_downloads(tmp_path / "text"), train=train)


def test_a_text_is_not_read_packed_and_unpacked(tmp_path: Path) -> None:
    root = opus_downloads(tmp_path / "text")
    for side in ("de", "en"):
        parallel_folder.write(root / f"Europarl.de-en.{side}.gz", ["a"])
    assert "are one text twice" in refusal(root, train={"de": "Europarl.de-en.de*"})


def test_dev_text_of_a_language_without_training_text_is_refused(tmp_path: Path) -> None:
    root = opus_downloads(tmp_path / "text")
    corpus(root / "dev.fr-en", 0, 5, ("fr", "en"))
    said = refusal(root, train={"de": "Europarl.de-en.de"}, dev={"fr": "dev.fr-en.fr"})
    assert "data.dev: data.train has no training text from 'fr' into 'en', only from de" in said


def test_a_run_names_its_files_on_the_command_line_and_reports_each(tmp_path: Path) -> None:
    root = opus_downloads(tmp_path / "text")
    files = f'data.train={{de: [{root}/Europarl.de-en.de, "{root}/WMT*.de"]}}'
    words = ["debug=tiny", "data=parallel_text", files, f"data.cache_dir={tmp_path}", "trainer.steps=1"]
    _, events = train_inline(tmp_path / "run", *words, "task.generation=null")
    said = [event["text"] for event in events if event["kind"] == "preparation" and "corpora" in event["text"]]
    assert said == [
        f"parallel text: 'de' is trained on {root}/Europarl.de-en.de (180 of 180 pairs), "
        f"{root}/WMT-News.de-en.de (120 of 120 pairs); corpora"
    ]


# --- records


FORMS = {
    "translation": lambda pair: {"id": "1", "translation": {"de": pair.source, "en": pair.target}},
    "languages": lambda pair: {"de": pair.source, "en": pair.target},
    "named": lambda pair: {"german": pair.source, "english": pair.target},
}


def records(form: str, count: int, split: str = "train") -> list[dict[str, Any]]:
    return [FORMS[form](pair) for pair in parallel_folder.pairs_of("de", count, split)]


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    return [json.dumps(row, ensure_ascii=False) for row in rows]


@pytest.mark.parametrize("form", FORMS)
def test_json_lines_hold_pairs_below_translation_or_in_two_columns(form: str, tmp_path: Path) -> None:
    named = {"columns": ["german", "english"]} if form == "named" else {}
    packed = {"translation": "", "languages": ".gz", "named": ".zst"}[form]
    parallel_folder.write(tmp_path / "text" / "de-en" / f"train.jsonl{packed}", lines_of(records(form, 300)))
    parallel_folder.write(tmp_path / "text" / "de-en" / "validation.json", lines_of(records(form, 20, "dev")))
    made = source(tmp_path / "text", **named)
    assert made.sizes == {"de": 300} and made.prepared_defects == {}
    held_out = {(sample.source, sample.reference) for sample in made.held_out("dev")}
    assert held_out == set(parallel_folder.pairs_of("de", 20, "dev"))
    other = source(tmp_path / "text", target="de", languages=["en"], columns=["english", "german"]) if named else made
    assert [*other.sizes] == (["en"] if named else ["de"])


def test_a_line_that_is_no_record_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    lines = lines_of(records("translation", 300))
    spoilt = {
        6: '{"translation": {"de": "torn',
        9: '{"translation": {"de": "ja"}}',
        12: '{"de": "a\\u0000b", "en": "c"}',
    }
    for place, line in spoilt.items():
        lines[place] = line
    parallel_folder.write(tmp_path / "text" / "de.jsonl", lines)
    named = {"train": {"de": "de.jsonl"}}
    made = source(tmp_path / "text", **named)
    assert made.sizes == {"de": 297}
    assert places(made)[1:] == [("malformed", "de.jsonl", 7), ("malformed", "de.jsonl", 10), ("nul", "de.jsonl", 13)]
    said = [one["found"] for one in defects(made)["defects"]]
    assert said[1].startswith("is no JSON (") and said[2] == "has no text under 'en' (data.columns), only under: de"
    wrong = refusal(tmp_path / "text", **named, columns=["src", "tgt"], on_defect={"malformed": "refuse"})
    assert "de.jsonl, line 1: has no text under 'src' (data.columns), only under: de, en" in wrong
    (tmp_path / "text" / "de.jsonl").write_text('[{"de": "a", "en": "b"}]')
    assert "is one JSON array, not JSON lines" in refusal(tmp_path / "text", **named)


@pytest.mark.parametrize("form", FORMS)
def test_parquet_as_it_is_downloaded(form: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows, folder = records(form, 300), tmp_path / "text" / "de-en"
    folder.mkdir(parents=True)
    rows[150] = dict.fromkeys(rows[150])
    files = {"train-00000-of-00002": rows[:140], "train-00001-of-00002": rows[140:], "test-00000-of-00001": rows[:5]}
    for name, of in files.items():
        parquet.write_table(
            pyarrow.Table.from_pylist([{**row, "vector": [0.5]} for row in of]), folder / f"{name}.parquet"
        )
    named = {"columns": ["german", "english"]} if form == "named" else {}
    made = source(tmp_path / "text", **named, preparation_workers=2)
    assert [*defects(made)["corpora"]["de"].values()] == [[135, 140], [159, 160]]
    assert ("malformed", "train-00001-of-00002.parquet", 11) in places(made)


def test_parquet_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    parallel_folder.write(tmp_path / "text" / "de-en" / "train.parquet", ["PAR1"])
    said = refusal(tmp_path / "text")
    assert "train.parquet is read by the pyarrow library: pip install 'gpipe-cli[parquet]'" in said
