"""Tests your own text: every kind of file gives the same tokens, and every defect is named with its file and line."""

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import parallel_folder
import pytest
import sentencepiece
from inline_run import train_inline
from refusals import refusal_of
from run_files import bytes_of
from text_sources import own_sentencepiece, own_tokenizer, places, prepared

from gpipe_cli.data.cldr import pairs as cldr
from gpipe_cli.data.test_sets import TextOfRun
from gpipe_cli.data.text.source import TextFilesSource, TextStore
from gpipe_cli.disk import write_whole
from gpipe_cli.errors import ConfigurationError

SMALL: dict[str, Any] = {"vocabulary": 300, "sequence_length": 16, "batch_size": 4, "held_out": 0.1}
SMALL["character_coverage"] = 1.0
PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, **parallel_folder.PACKERS}


def documents(count: int = 120) -> list[str]:
    """Returns texts of letters that each vocabulary knows, whichever texts are held out."""
    texts = [pair.target for pair in cldr.train_pairs("de", 4 * count, seed=0)]
    letters = Counter(letter for text in texts for letter in set(text))
    return [text for text in texts if all(letters[letter] > 20 for letter in text)][:count]


def write(path: Path, content: str | bytes, packed: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path = path.with_name(path.name + packed)
    path.write_bytes(PACK[packed](data))
    return path


def as_json(texts: list[str], key: str = "text") -> str:
    return "".join(json.dumps({"id": number, key: text}) + "\n" for number, text in enumerate(texts))


def source(root: Path, **changes: Any) -> TextFilesSource:
    return prepared(TextFilesSource, root, {**SMALL, **changes})


def refusal(root: Path, **changes: Any) -> str:
    return refusal_of(prepared, TextFilesSource, root, {**SMALL, **changes})


def ids(tokens: Any) -> list[int]:
    return list(tokens[np.arange(len(tokens))].tolist())


def texts_of(made: TextFilesSource, split: str = "train") -> list[str]:
    """Returns the documents of a store, decoded."""
    store = made._store
    row = np.array(ids(getattr(store, split)))
    ends = np.flatnonzero(row == store.source_vocabulary.eos_id) + 1
    return [store.source_vocabulary.decode(part.tolist()) for part in np.split(row, ends)[:-1]]


# --- what is read


@pytest.mark.parametrize(
    ("kind", "packed"), [("blank_line", ""), ("blank_line", ".gz"), ("line", ".xz"), ("json", ".bz2"), ("json", ".zst")]
)
def test_every_kind_of_file_gives_the_same_documents(kind: str, packed: str, tmp_path: Path) -> None:
    wanted = documents()
    content = {"blank_line": "\n\n".join(wanted), "line": "\r\n".join(wanted), "json": as_json(wanted, "body")}[kind]
    write(tmp_path / "text" / ("a.jsonl" if kind == "json" else "a.txt"), content, packed)
    made = source(tmp_path / "text", document="line" if kind == "line" else "blank_line", json_key="body")
    trained, held_out = texts_of(made), texts_of(made, "dev")
    assert sorted(trained + held_out) == sorted(wanted) and 2 < len(held_out) < 30
    assert trained == [text for text in wanted if text in set(trained)]  # in their order


@pytest.mark.parametrize("packed", parallel_folder.PACKERS)
def test_an_archive_of_several_streams_is_read_whole_and_a_torn_one_is_refused(packed: str, tmp_path: Path) -> None:
    first, second = (PACK[packed]("\n\n".join(part).encode() + b"\n\n") for part in np.split(np.array(documents()), 2))
    padding = bytes(8 if packed in (".gz", ".xz") else 0)
    made = source(write(tmp_path / f"a.txt{packed}", first + padding + second + padding))
    assert len(texts_of(made)) + len(texts_of(made, "dev")) == len(documents())
    for torn in (first[:-9], first + second[:-1], first + b"no archive"):
        said = refusal(write(tmp_path / f"torn.txt{packed}", torn))
        assert f"torn.txt{packed}: cannot be read" in said and "torn, of another format" in said


def test_parquet_gives_the_documents_of_json_lines_and_names_the_row(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    wanted = documents()
    rows = [{"id": number, "text": text} for number, text in enumerate([*wanted[:50], None, *wanted[50:]])]
    (tmp_path / "text").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "text" / "train-00000-of-00001.parquet")
    made = source(tmp_path / "text", preparation_workers=2)
    assert sorted(texts_of(made) + texts_of(made, "dev")) == sorted(wanted)
    assert places(made) == [("malformed", "train-00000-of-00001.parquet", 51)]


def test_a_share_is_held_out_by_content_or_a_file_is_named(tmp_path: Path) -> None:
    wanted = documents()
    write(tmp_path / "text" / "b" / "2.txt", "\n\n".join(wanted[60:]))
    write(tmp_path / "text" / "a.md", "\n\n".join(wanted[:60]))
    one = write(tmp_path / "one.txt", "\n\n".join(reversed(wanted)))
    by_hash = source(tmp_path / "text")
    assert set(texts_of(by_hash, "dev")) == set(texts_of(source(one), "dev"))
    assert set(texts_of(by_hash, "dev")) != set(texts_of(source(one, corpus_seed=1), "dev"))
    named = source(tmp_path / "text" / "b", evaluation_root=str(tmp_path / "text" / "a.md"))
    assert texts_of(named) == wanted[60:] and len(texts_of(named, "dev")) == 60


def test_windows_follow_the_text_and_each_comes_once_an_epoch(tmp_path: Path) -> None:
    made = source(write(tmp_path / "text.txt", "\n\n".join(documents())), sequence_length=8)
    row, windows = ids(made._store.train), made._count()
    batches = list(islice(made.train(None, 2, 0, 1), -(-windows // 4)))
    pairs = [pair for batch in batches for pair in batch.micro_batches]
    seen = [[*i, t[-1]] for (x,), (y,) in pairs for i, t in zip(x.tolist(), y.tolist(), strict=True)][:windows]
    assert sorted(seen) == sorted(row[first : first + 9] for first in range(0, 8 * windows, 8))
    assert seen != [row[first : first + 9] for first in range(0, 8 * windows, 8)]
    halves = [next(made.train(batches[4].position, 1, replica, 2)).micro_batches[0] for replica in (0, 1)]
    assert [x.tolist() for (x,), _ in halves] == [x.tolist() for (x,), _ in batches[5].micro_batches]


def test_an_evaluation_reads_the_held_out_text_once_or_a_share_of_it(tmp_path: Path) -> None:
    root = write(tmp_path / "text.txt", "\n\n".join(documents()))
    made = source(root, sequence_length=8, evaluation_windows=None)
    targets = np.concatenate([t[0].numpy().reshape(-1) for batch in made.evaluation(3) for _, t in batch.micro_batches])
    assert targets[targets != -100].tolist() == ids(made._store.dev)[1:] and (targets == -100).sum() < 8
    fewer = source(root, sequence_length=8, evaluation_windows=5)
    assert sum(len(t[0]) for batch in fewer.evaluation(3) for _, t in batch.micro_batches) == 5


def test_what_is_passed_over_is_counted_and_a_pattern_chooses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, texts = tmp_path / "text", documents()
    for number in range(3):
        write(root / f"src{number}" / "a.py", "\n\n".join(texts[40 * number : 40 * number + 40]))
    write(root / "a.txt", "\n\n".join(texts[:60]))
    write(root / "LICENSE", "a")
    assert len(texts_of(made := source(root))) + len(texts_of(made, "dev")) == 60
    assert "4 files are passed over (LICENSE, a.py, a.py, a.py): data.files='**/*' reads all" in caplog.text
    made = source(root, files="**/*.py")
    assert sorted(texts_of(made) + texts_of(made, "dev")) == sorted(texts)
    assert texts_of(source(root, files=f"{root}/**/*.py")) == texts_of(made)
    assert "data.files=*.c: there is no such file in data.root=" in refusal(root, files="*.c")


SETS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {  # file: the split that it is read as; keys
    "files": ({"train.txt": "train", "validation.txt": "dev", "test.txt": ""}, {}),
    "folders": ({"train/a.txt": "train", "valid/a.txt": "dev", "test/b.txt": ""}, {}),
    "shards": ({"c4-train.00000-of-00002.txt": "train", "c4-validation.00000-of-00001.txt": "dev"}, {}),
    "in names": ({"train_clean.txt": "train", "eval.txt": "dev", "test_other.txt": "", "DevTestSet.txt": ""}, {}),
    "of a hub": ({"data/train.txt": "train", "data/test.txt": "", "README.md": "", "LICENSE.txt": ""}, {}),
    "without a train": ({"books.txt": "train", "my-dev.txt": "dev"}, {}),
    "by a pattern": ({"wiki.train.raw": "train", "wiki.valid.raw": "dev", "wiki.test.raw": ""}, {"files": "*.raw"}),
    "code": ({"test.py": "train", "latest.py": "train"}, {"files": "*.py"}),
}


@pytest.mark.parametrize("of_set", SETS)
def test_a_set_is_read_by_its_splits_and_what_is_about_it_is_not(
    of_set: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (files, keys), texts, counts = SETS[of_set], documents(), Counter[str]()
    for number, (name, split) in enumerate(files.items()):
        write(tmp_path / "set" / name, "\n\n".join(texts[: 30 + number]))
        counts[split] += 30 + number
    made = source(tmp_path / "set", vocabulary=150, held_out=0.0 if counts["dev"] else 0.3, **keys)
    trained, held_out = len(texts_of(made)), len(texts_of(made, "dev"))
    assert trained + held_out == counts["train"] + counts["dev"] and counts["dev"] in (0, held_out)
    for name, split in files.items():
        assert split or Path(name).name in caplog.text


def test_text_to_test_on_is_trained_on_only_where_it_is_named(tmp_path: Path) -> None:
    test = write(tmp_path / "set" / "test.txt", "\n\n".join(documents()))
    assert "has text to test on alone, as test.txt: name other text" in refusal(test.parent)
    assert texts_of(source(test.parent, files="*.txt")) == texts_of(source(test))
    write(test.parent / "train.txt", "\n\n".join(documents()[:60]))
    evaluated = source(test.parent, evaluation_root=str(test), vocabulary=150)
    assert (len(texts_of(evaluated)), len(texts_of(evaluated, "dev"))) == (60, 120)


# --- the same bytes by any number of processes


def test_the_number_of_processes_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "text" / "a.txt", "\n\n".join(documents(80)))
    write(tmp_path / "text" / "b.jsonl", as_json(documents(120)[80:]), ".gz")
    monkeypatch.setattr("gpipe_cli.data.text.source.PIECE", 500)
    one = source(tmp_path / "text", preparation_workers=1)._store.folder
    two = source(tmp_path / "text", preparation_workers=2, cache_dir=str(tmp_path / "two"))._store.folder
    assert len(TextStore(one).description["digests"]) > 5 and bytes_of(two) == bytes_of(one)


# --- what cannot be used


@pytest.mark.parametrize(
    ("kind", "file", "line"),
    [
        ("undecodable", "a.txt", b"caf\xe9"),
        ("nul", "a.txt", b"a\0b"),
        ("malformed", "a.jsonl", b'{"text": "torn'),
        ("malformed", "a.jsonl", b'["text"]'),
        ("malformed", "a.jsonl", b'{"body": "elsewhere"}'),
        ("malformed", "a.jsonl", b'{"text": "\\ud83d"}'),
        ("empty", "a.jsonl", b'{"text": " "}'),
        ("too_long", "a.txt", b"x" * 5000),
    ],
)
def test_a_bad_line_is_dropped_counted_and_named(
    kind: str, file: str, line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpipe_cli.data.text.files.MOST_LINE", 4000)
    monkeypatch.setattr("gpipe_cli.data.text.source.PIECE", 1000)
    good = "\n".join(documents()).encode() if file == "a.txt" else as_json(documents()).encode().rstrip(b"\n")
    root = write(tmp_path / "text" / file, b"\n".join([good, line, good])).parent
    made = source(root, document="line", preparation_workers=1)
    assert places(made) == [(kind, file, 121)] and made.prepared_defects == {kind: 1}
    assert len(texts_of(made)) + len(texts_of(made, "dev")) == 240


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt and the others have no document"),
        ("a.txt", bytes(range(256)) * 40, "a.txt, line 1: has a NUL byte"),
        ("a.txt", "Füße, Bäume, Häuser, Öl und Übel\n".encode("latin-1") * 50, "a.txt, line 1: is not UTF-8"),
        ("a.json", b'{\n "text": "one"\n}', "a.json, line 1: is no JSON ("),
    ],
    ids=["empty", "binary", "latin-1", "object in lines"],
)
def test_a_file_that_is_no_text_is_refused_by_its_name(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    write(tmp_path / "text" / name, content)
    assert message in refusal(tmp_path / "text")


def test_a_wrong_place_or_too_little_text_says_what_to_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "text" / "a.txt", "\n".join(documents()))
    write(tmp_path / "twice" / "a.txt", "a")
    write(tmp_path / "twice" / "a.txt", "a", ".gz")
    for place in ("empty", "nowhere"):
        said = refusal(tmp_path / place)
        assert f"data.root={tmp_path / place}: there is no text" in said and ".jsonl" in said
    assert "are one text twice" in refusal(tmp_path / "twice")
    key = write(tmp_path / "key" / "a.jsonl", as_json(documents(), "body"))
    assert f"{key}, line 1: has no text under 'text' (data.json_key), only under: body" in refusal(key)
    assert "data.document=line" in refusal(tmp_path / "text", held_out=0.0)
    assert "data.held_out=1e-09: raise it" in refusal(tmp_path / "text", held_out=1e-9) and not caplog.text
    assert "lower data.sequence_length=100000" in refusal(tmp_path / "text", document="line", sequence_length=100_000)


def test_a_name_that_is_no_utf8_is_read_told_and_written_down(tmp_path: Path) -> None:
    root = write(Path(os.fsdecode(bytes(tmp_path) + b"/te\xe9xt/caf\xe9.txt")), "\n\n".join(documents())).parent
    write(root / "b.txt", b"caf\xe9\n\n" + documents()[0].encode())
    assert places(source(root)) == [("undecodable", "b.txt", 1)] and len(texts_of(source(root))) > 80
    (root / "b.txt").rename(root / os.fsdecode(b"\xe9.txt"))
    assert "/te\\xe9xt/\\xe9.txt, line 1: is not UTF-8" in source(root)._store.defects.first["undecodable"]
    write_whole(tmp_path / "error.txt", f"{root}")


# --- training


def test_a_run_goes_on_on_other_text_with_its_vocabulary_or_is_warned(tmp_path: Path) -> None:
    roots = [write(tmp_path / name, "\n\n".join(documents()[first:])) for name, first in (("a", 0), ("b", 40))]
    words = ["debug=tiny", "model=transformer_lm", "data=text", f"data.cache_dir={tmp_path}/cache", "trainer.steps=1"]
    words += ["model.L=1", "trainer.evaluate_first=false", "trainer.evaluate_every=null", "data.vocabulary=300"]
    words += ["data.held_out=0.2", "data.evaluation_windows=2"]
    train_inline(tmp_path / "run", *words, f"data.root={roots[0]}")
    kept = tmp_path / "run" / "vocabulary" / "source.model"
    words.append(f"checkpoint.init_from={tmp_path / 'run' / 'checkpoints' / 'step_00000001'}")
    said = []
    for number, more in enumerate(([], [f"data.tokenizer={kept}"])):
        _, events = train_inline(tmp_path / f"next{number}", *words, f"data.root={roots[1]}", *more)
        said.append([event["text"] for event in events if event.get("kind") == "warning"])
    (told,) = [text for text in said[0] if "trained with another vocabulary (source.model)" in text]
    assert f"data.tokenizer={tmp_path / 'run'} keeps them" in told
    assert not any("another vocabulary" in text for text in said[1])
    assert (tmp_path / "next1" / "vocabulary" / "source.model").read_bytes() == kept.read_bytes()


def test_line_breaks_and_blank_lines_of_code_are_kept_where_a_file_is_a_document(tmp_path: Path) -> None:
    code = {f"{n}.py": f"def f{n}(x):\n    y = x\n\n    return y\n\n\nclass A:\n\tpass" for n in range(20)}
    for name, content in code.items():
        write(tmp_path / "code" / name, content)
    tokenizer = str(own_tokenizer(tmp_path, code.values(), ["<|endoftext|>"]))
    read = source(tmp_path / "code", tokenizer=tokenizer, document="file", files="**/*.py")
    assert sorted(texts_of(read) + texts_of(read, "dev")) == sorted(code.values())


def test_a_tokenizer_json_gives_its_ids(tmp_path: Path) -> None:
    two_lines = [f"{text}\n{text}" for text in documents()]
    tokenizer = str(own_tokenizer(tmp_path, two_lines, ["<|endoftext|>", "<pad>"]))
    root = write(tmp_path / "text" / "a.jsonl", as_json(two_lines)).parent
    ours = source(root, tokenizer=tokenizer)
    assert sorted(texts_of(ours) + texts_of(ours, "dev")) == sorted(two_lines) and ours.eos_id == 0
    assert ours.decode(ours.encode(["\x1b[31m\tred"])[0]) == "\ufffd[31m\tred"
    turns = [0, *ours.encode(["a turn"])[0], 0, *ours.encode(["an answer"])[0]]
    end = "<|endoftext|>"
    assert ours.decode([*turns, 0, 5], after=len(turns)) == f"{end}a turn{end}an answer"
    assert ours.decode(turns[1:]) == "a turn" and ours.decode([1, *turns[1:]]) == "<pad>a turn"
    ours.keep_vocabularies(tmp_path / "kept")
    assert (tmp_path / "kept" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    with pytest.raises(ConfigurationError, match=r"has no token <end>.*its special tokens: <\|endoftext\|>, <pad>"):
        source(root, tokenizer=tokenizer, end_token="<end>")
    with pytest.raises(ConfigurationError, match=r"use data\.vocabulary=\d+"):
        source(root, tokenizer=tokenizer, vocabulary=100)
    assert "is no tokenizer.json" in refusal(root, tokenizer=str(root / "a.jsonl"))


def test_a_sentencepiece_model_made_elsewhere_gives_its_own_ids_and_end(tmp_path: Path) -> None:
    model = own_sentencepiece(tmp_path, documents())
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ours = source(write(tmp_path / "text" / "a.txt", "\n\n".join(documents())), tokenizer=str(model))
    text = documents()[0]
    assert ours.encode([text]) == [pieces.encode(text)] and ours.eos_id == pieces.eos_id() == 2
    assert sorted(texts_of(ours) + texts_of(ours, "dev")) == sorted(documents())
    assert ours.decode([1, *ours.encode([text])[0], 2, 9]) == text
    assert "has no end piece" in refusal(
        tmp_path / "text", tokenizer=str(own_sentencepiece(tmp_path, ["a b"], eos_id=-1))
    )


@pytest.mark.parametrize("named", ["</s>", {"content": "</s>"}, None])
def test_a_document_ends_with_the_token_that_the_configuration_beside_names(named: Any, tmp_path: Path) -> None:
    tokenizer = own_tokenizer(tmp_path, documents(), ["</s>", "<eos>"])
    if named:
        write(tmp_path / "tokenizer_config.json", json.dumps({"eos_token": named}))
    root = write(tmp_path / "text" / "a.txt", "\n\n".join(documents()))
    ours = source(root, tokenizer=str(tokenizer))
    ours.keep_vocabularies(tmp_path / "kept")
    kept = TextOfRun(str(tmp_path / "kept"))
    assert ours.eos_id == kept.eos_id == (0 if named else 1)
