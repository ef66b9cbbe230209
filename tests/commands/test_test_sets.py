"""Tests gpipe-eval RUN test=…: a test set is read in its own form, with the run's vocabulary and no training text."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from inline_run import train_inline

from gpipe_cli.commands.eval import main

INLINE = ("launch.inline=true", "pipeline.workers=1", "trainer.samples=0")
WORDS = ["the", "cat", "dog", "sees", "a", "small", "big", "house", "tree", "river", "under", "over"]


def sentences(count: int, seed: int) -> list[str]:
    return [" ".join(WORDS[(seed + 5 * n + k * k) % len(WORDS)] for k in range(3 + n % 4)) for n in range(count)]


@pytest.fixture(scope="module")
def translation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a tiny run from upper case into lower case; its training text is gone afterwards."""
    folder = tmp_path_factory.mktemp("translation")
    text = folder / "text" / "de-en"
    text.mkdir(parents=True)
    for split, count in (("train", 200), ("dev", 8)):
        lines = sentences(count, len(split))
        for ending, change in (("de", str.upper), ("en", str)):
            (text / f"{split}.{ending}").write_text("".join(f"{change(line)}\n" for line in lines))
    data = ["data=parallel_text", f"data.root={folder}/text", "data.smaller_vocabulary=true"]
    words = ["debug=tiny", "trainer.steps=2", "trainer.evaluate_every=null", "task.generation.beam=1"]
    train_inline(folder / "run", *data, *words)
    (folder / "text").rename(folder / "elsewhere")
    return folder / "run"


def report_of(run: Path, test: Path, *words: str) -> dict[str, Any]:
    assert main([str(run), f"test={test}", f"output={run.parent}/out", *INLINE, *words]) == 0
    return dict(json.loads((run.parent / "out" / "evaluation.json").read_text()))


def tmx(pairs: list[tuple[str, str]]) -> str:
    units = "".join(
        f'<tu><tuv xml:lang="de"><seg>{de}</seg></tuv><tuv xml:lang="en"><seg>{en}</seg></tuv></tu>' for de, en in pairs
    )
    return f'<tmx version="1.4"><header/><body>{units}</body></tmx>'


def po(pairs: list[tuple[str, str]]) -> str:
    head = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    return head + "".join(f'msgid "{en}"\nmsgstr "{de}"\n\n' for de, en in dict.fromkeys(pairs))


def test_pairs_in_any_form_are_scored_alike(translation: Path, tmp_path: Path) -> None:
    pairs = [(line.upper(), line) for line in dict.fromkeys(sentences(12, 3))]
    (tmp_path / "memory.tmx").write_text(tmx(pairs))
    (tmp_path / "own.de.po").write_text(po(pairs))
    (tmp_path / "own.csv").write_text("de,en\n" + "".join(f"{de},{en}\n" for de, en in pairs))
    with gzip.open(tmp_path / "mine.de.gz", "wt") as file:
        file.writelines(f"{de}\n" for de, _ in pairs)
    (tmp_path / "mine.en").write_text("".join(f"{en}\n" for _, en in pairs))
    reports = [report_of(translation, tmp_path / name) for name in ("memory.tmx", "own.de.po", "own.csv", "mine.de.gz")]
    assert [report["sentences"] for report in reports] == [{"de": len(pairs)}] * 4
    assert all(report["numbers"] == reports[0]["numbers"] for report in reports)
    assert reports[0]["signature"] and set(reports[0]["copying"]) == {"de"}
    assert "bleu_copying" in reports[0]["numbers"]
    table = (translation.parent / "out" / "languages.csv").read_text().splitlines()
    assert table[0] == "language,sentences,bleu,bleu_copying" and table[1].startswith(f"de,{len(pairs)},")


def test_a_folder_is_tested_on_what_is_named_test(translation: Path, tmp_path: Path) -> None:
    for split, count in (("train", 9), ("test", 5)):
        (tmp_path / f"{split}.de-en.tsv").write_text("".join(f"{s.upper()}\t{s}\n" for s in sentences(count, 1)))
    assert report_of(translation, tmp_path)["sentences"] == {"de": 5}


@pytest.mark.parametrize("content", [None, ""], ids=["missing", "empty"])
def test_what_is_no_test_set_is_refused(translation: Path, content: str | None, tmp_path: Path, capsys: Any) -> None:
    if content is not None:
        (tmp_path / "x.tsv").write_text(content)
    assert main([str(translation), f"test={tmp_path}/x.tsv", *INLINE]) == 2
    assert f"test={tmp_path}/x.tsv" in capsys.readouterr().err


def test_a_text_has_the_perplexity_of_all_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("\n\n".join(sentences(300, 1)))
    words = ["model=transformer_lm_small", "debug=tiny", "data=text", f"data.root={tmp_path}/train.txt"]
    train_inline(tmp_path / "run", *words, "trainer.steps=2", "trainer.evaluate_every=null", "data.held_out=0.2")
    (tmp_path / "train.txt").unlink()
    (tmp_path / "own.txt").write_text("\n\n".join(sentences(40, 2)))
    numbers = report_of(tmp_path / "run", tmp_path / "own.txt")["numbers"]
    assert numbers["perplexity"] == pytest.approx(math.exp(numbers["nll"]))
