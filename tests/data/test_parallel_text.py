"""Tests folders of parallel text: every layout is found, and every defect is named with its file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import parallel_folder
import pytest
from inline_run import train_inline
from run_files import rows
from text_sources import defects, places, prepared, refusal_of

from gpipe_cli.data.defects import KINDS, check_policy
from gpipe_cli.data.parallel.folders import find_pairs
from gpipe_cli.data.parallel.source import ParallelTextSource
from gpipe_cli.errors import ConfigurationError

SMALL: dict[str, Any] = {"source_vocabulary": 300, "target_vocabulary": 300, "batch_tokens": 500}


def source(root: Path, **changes: Any) -> ParallelTextSource:
    return prepared(ParallelTextSource, root, {**SMALL, **changes})


def refusal(root: Path, **changes: Any) -> str:
    return refusal_of(ParallelTextSource, root, {**SMALL, **changes})


def sources_read(made: ParallelTextSource) -> set[str]:
    """Returns the training sentences of a store, decoded."""
    store = made._store
    texts: set[str] = set()
    for number, size in enumerate(store.sizes.values()):
        ids, lengths = store.gather(store.locate(np.full(size, number), np.arange(size)))[0]
        texts |= {store.source_vocabulary.decode(of.tolist()) for of in np.split(ids, np.cumsum(lengths)[:-1])}
    return texts


# --- layouts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ending"),
    [(parallel_folder.opus, ""), (parallel_folder.folders, ".gz"), (parallel_folder.tables, ".zst")],
    ids=["opus", "folders", "tables"],
)
def test_every_layout_gives_the_same_languages_and_sentences(
    layout: Callable[..., Path], ending: str, tmp_path: Path
) -> None:
    made = source(layout(tmp_path / "text", ending))
    assert made.sizes == parallel_folder.SIZES
    found = {(sample.language, sample.source, sample.reference) for sample in made.held_out("dev")}
    assert found == {(code, *pair) for code in made.sizes for pair in parallel_folder.pairs_of(code, 20, "dev")}


def test_a_plain_table_needs_its_language_told(tmp_path: Path) -> None:
    pairs = parallel_folder.pairs_of("de", 300)
    parallel_folder.write(tmp_path / "text" / "train.tsv", ["\t".join(pair) for pair in pairs])
    assert "train.tsv has no language in its name" in refusal(tmp_path / "text")
    assert source(tmp_path / "text", pair="de").sizes == {"de": 300}


def test_languages_can_be_listed(tmp_path: Path) -> None:
    root = parallel_folder.opus(tmp_path / "text")
    assert source(root, languages=["sw", "de"]).sizes == {"sw": 120, "de": 300}
    assert source(root, pair="sw", source_vocabulary=150, target_vocabulary=150).sizes == {"sw": 120}


def test_another_target_language_reverses_the_pairs(tmp_path: Path) -> None:
    made = source(parallel_folder.plain(tmp_path / "text"), target="de")
    assert [*made.sizes] == ["en"]
    assert made.held_out("dev")[0].reference == parallel_folder.pairs_of("de", 1, "dev")[0].source


def packed_too(root: Path) -> str:
    parallel_folder.write(root / "train.de.gz", ["a"])
    return "one text twice"


def in_utf_16(root: Path) -> str:
    (root / "train.de").write_bytes((root / "train.de").read_text().encode("utf-16-be"))
    return f"{root}/train.de is UTF-16 text, not UTF-8: iconv"


def blank_lines(root: Path) -> str:
    (root / "train.de").write_text("\n" * 300)
    return "no pair of lines has text on both sides"


@pytest.mark.parametrize("spoilt", [packed_too, in_utf_16, blank_lines])
def test_text_that_cannot_be_used_is_refused_by_its_name(spoilt: Callable[[Path], str], root: Path) -> None:
    said = spoilt(root)
    assert said in refusal(root)


def test_a_language_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    root = parallel_folder.opus(tmp_path / "text")
    assert "no training text from 'fr' into 'en', only from de, fi, sw" in refusal(root, languages=["fr"])


@pytest.mark.parametrize("root", [None, "absent", "empty", "unknown"])
def test_a_root_without_text_says_what_was_expected(root: str | None, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    parallel_folder.write(tmp_path / "unknown" / "corpus.txt", ["a line"])
    with pytest.raises(ConfigurationError, match=r"data\.root.*xx-en/opus\.xx-en-train\.xx.*train\.tsv.*\.gz, \.zst"):
        find_pairs(None if root is None else str(tmp_path / root), None, "en")


# --- defects


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return parallel_folder.plain(tmp_path / "text", dev="dev")


def spoil(path: Path, line: int, by: bytes) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = by
    path.write_bytes(b"\n".join(lines))


LINES = {  # kind: what spoils line 7 of the sources, and what is said
    "undecodable": (b"caf\xe9", "is not UTF-8"),
    "empty": (b"  ", "source is empty"),
    "nul": (b"a\0b", "has a NUL byte"),
    "too_long": (b" ".join(b"%d" % n for n in range(60)), "is too long: "),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_bad_line_is_dropped_counted_and_named(kind: str, root: Path) -> None:
    whole = sources_read(source(root))
    spoil(root / "train.de", 7, LINES[kind][0])
    made = source(root)
    assert places(made) == [(kind, "train.de", 7)] and defects(made)["counts"] == {"de": {kind: 1}}
    assert made.sizes == {"de": 299}
    assert len(whole - sources_read(made)) == 1 and not sources_read(made) - whole
    said = refusal(root, on_defect={kind: "refuse"})  # by a store that is there, too
    assert f"{root}/train.de, line 7: {LINES[kind][1]}" in said and f"data.on_defect.{kind}=drop" in said
    assert refusal(root, strict=True) == said


def test_files_of_different_lengths_are_refused_with_both_numbers(root: Path) -> None:
    (root / "train.en").write_text("".join((root / "train.en").read_text().splitlines(keepends=True)[:290]))
    said = refusal(root)
    assert f"{root}/train.de, line 291" in said and "300 lines, but 290 in" in said
    assert "data.on_defect.misaligned=drop" in said


def test_files_of_different_lengths_can_be_dropped_as_a_whole(tmp_path: Path) -> None:
    root = parallel_folder.opus(tmp_path / "text")
    with (root / "sw-en" / "opus.sw-en-train.en").open("a") as file:
        file.write("one line more\n")
    made = source(root, on_defect={"misaligned": "drop"})
    assert [*made.sizes] == ["de", "fi"]
    assert places(made) == [("misaligned", "opus.sw-en-train.en", 121)]


def test_a_row_of_a_table_with_another_number_of_tabs_is_named(tmp_path: Path) -> None:
    root = parallel_folder.tables(tmp_path / "text", sizes={"de": 300})
    spoil(root / "de-en" / "train.tsv", 5, b"a\tb\tc")
    assert places(source(root)) == [("malformed", "train.tsv", 5)]


def test_a_language_without_a_dev_set_is_trained_on_and_named(tmp_path: Path) -> None:
    root = parallel_folder.opus(tmp_path / "text")
    for path in root.rglob("opus.sw-en-dev.*"):
        path.unlink()
    made = source(root)
    assert places(made) == [("no_dev", "text", 0)] and made.sizes["sw"] == 120
    assert {sample.language for sample in made.held_out("dev")} == {"de", "fi"}
    assert "language 'sw' has no dev set" in refusal(root, on_defect={"no_dev": "refuse"})


def test_a_policy_names_its_kinds_and_words() -> None:
    assert check_policy({}, strict=True) == {**dict.fromkeys(KINDS, "refuse"), "copied": "keep"}
    with pytest.raises(ConfigurationError, match=r"data\.on_defect\.tooo_long: there are only"):
        check_policy({"tooo_long": "drop"})
    with pytest.raises(ConfigurationError, match=r"data\.on_defect\.empty=keep: use drop or refuse"):
        check_policy({"empty": "keep"})


def test_a_byte_order_mark_is_removed_and_counted(root: Path) -> None:
    whole = sources_read(source(root))
    (root / "train.de").write_bytes(b"\xef\xbb\xbf" + (root / "train.de").read_bytes())
    made = source(root)
    assert places(made) == [("byte_order_mark", "train.de", 1)] and sources_read(made) == whole


def spoil_both(root: Path, line: int, de: bytes, en: bytes) -> None:
    spoil(root / "train.de", line, de)
    spoil(root / "train.en", line, en)


def test_training_pairs_that_are_held_out_are_dropped_or_kept_and_counted(root: Path) -> None:
    for line, split in ((7, "dev"), (8, "test")):
        spoil_both(root, line, *((root / f"{split}.{side}").read_bytes().split(b"\n")[3] for side in ("de", "en")))
    spoil(root / "train.de", 9, (root / "dev.de").read_bytes().split(b"\n")[3])  # translated otherwise: another pair
    made = source(root)
    assert places(made) == [("held_out", "train.de", 7), ("held_out", "train.de", 8)] and made.sizes == {"de": 298}
    kept = source(root, on_defect={"held_out": "keep"})
    assert kept.prepared_defects == {"held_out": 2} and kept.sizes == {"de": 300}


def test_pairs_whose_source_is_its_translation_are_kept_or_dropped_and_counted(root: Path) -> None:
    spoil_both(root, 7, b"one line", b"one line")
    made = source(root)
    assert places(made) == [("copied", "train.de", 7)] and made.sizes == {"de": 300}
    assert source(root, on_defect={"copied": "drop"}).sizes == {"de": 299}
    assert "line 7: has a source that equals its target" in refusal(root, on_defect={"copied": "refuse"})


# --- vocabularies


def test_each_side_has_a_vocabulary_of_its_size_or_both_share_one(root: Path) -> None:
    apart = source(root, target_vocabulary=200)._store
    assert (len(apart.source_vocabulary), len(apart.target_vocabulary)) == (300, 200)
    shared = source(root, vocabulary=300)._store
    assert shared.target_vocabulary is shared.source_vocabulary


def test_a_vocabulary_may_be_as_small_as_the_text_and_says_so_each_time(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"source_vocabulary": 9000, "target_vocabulary": 9000}
    for _ in range(2):
        caplog.clear()
        made = source(root, smaller_vocabulary=True, **sizes)._store
        pieces = f"{len(made.target_vocabulary):,} pieces"
        assert f"data.target_vocabulary=9000, but the text supports {pieces}" in caplog.text
    assert made.target_vocabulary.decode([8999, 5]) == made.target_vocabulary.decode([5])  # the model knows more ids


# --- a run


def test_what_was_left_out_is_said_once_and_counted_in_every_run(root: Path, tmp_path: Path) -> None:
    spoil(root / "train.de", 7, b"")
    spoil_both(root, 8, b"one line", b"one line")
    words = ["debug=tiny", "data=parallel_text", f"data.root={root}", f"data.cache_dir={tmp_path}", "trainer.steps=1"]
    for run in ("first", "from the cache"):
        summary, events = train_inline(tmp_path / run, *words, "task.generation=null")
        assert summary["data_defects"] == {"empty": 1, "copied": 1}
        said = [event["text"] for event in events if event["kind"] == "warning"]
        counts = "parallel text: 299 of 300 training pairs are used: dropped 1 empty; kept 1 copied; such as "
        counts += f"{root}/train.de, line 7: source is empty; which ones: "
        assert [text.startswith(counts) and text.endswith("defects.json") for text in said] == [True]
        assert not [event for event in events if event["kind"] == "preparation" and event["done"] > event["total"] > 0]


def test_a_run_logs_how_often_each_language_was_read(tmp_path: Path) -> None:
    root = parallel_folder.opus(tmp_path / "text")
    words = ["debug=tiny", "data=parallel_text", f"data.root={root}", f"data.cache_dir={tmp_path}", "trainer.steps=2"]
    train_inline(tmp_path / "run", *words, "task.generation=null", "trainer.evaluate_every=null")
    read = [row["epochs"] for row in rows(tmp_path / "run" / "evaluations.jsonl")]
    assert read[0] == {"de": 0, "fi": 0, "sw": 0}
    assert sum(read[-1][code] * size for code, size in parallel_folder.SIZES.items()) == pytest.approx(32)


def test_a_corpus_without_any_dev_set_is_trained_on(tmp_path: Path) -> None:
    root = parallel_folder.plain(tmp_path / "text")
    for path in root.glob("valid.*"):
        path.unlink()
    words = ("debug=tiny", "data=parallel_text", f"data.root={root}", f"data.cache_dir={tmp_path}", "trainer.steps=1")
    summary, _ = train_inline(tmp_path / "run", *words)
    assert summary["steps"] == 1
