"""Tests that a translation run goes on to other text with its vocabulary; another vocabulary is refused early."""

import json
from pathlib import Path

import parallel_folder
import pytest

from gpipe_cli.commands import eval as evaluation
from gpipe_cli.commands.train import main

INLINE = ["launch.inline=true", "pipeline.workers=1", "trainer.samples=0"]
TINY = ["debug=tiny", "data=parallel_text", "trainer.evaluate_every=null", "trainer.evaluate_first=false", *INLINE]
TINY += [
    "trainer.steps=1",
    "task.generation.per_language_at_end=1",
    "task.generation.beam=1",
    "data.source_vocabulary=150",
    "data.target_vocabulary=150",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with text of three languages and a run that has trained on it."""
    folder = tmp_path_factory.mktemp("other_text")
    parallel_folder.opus(folder / "text")
    assert trained(folder, "run") == 0
    return folder


def trained(folder: Path, run: str, *words: str) -> int:
    places = [f"data.root={folder / 'text'}", f"data.cache_dir={folder / 'cache'}", f"hydra.run.dir={folder / run}"]
    return main([*TINY, *places, *words])


def stores(folder: Path) -> set[Path]:
    return set((folder / "cache").glob("parallel-*"))


def test_an_evaluation_of_some_languages_reads_them_with_the_vocabulary_of_the_run(folder: Path) -> None:
    words = [f"checkpoint={folder / 'run'}", f"output={folder / 'report'}", f"data.cache_dir={folder / 'cache'}"]
    more = ["data.languages=[de]", *INLINE]
    assert evaluation.main([*words, *more]) == 0
    report = json.loads((folder / "report" / "evaluation.json").read_text())
    assert report["sizes"] == {"de": 300} and set(report["sentences"]) == {"de"}


def test_a_run_goes_on_with_some_languages_and_its_vocabulary(folder: Path) -> None:
    again = [f"checkpoint.resume={folder / 'run'}", "checkpoint.allow_changes=[data]", "trainer.steps=2"]
    assert trained(folder, "next", *again, "data.languages=[de]") == 0
    files = [folder / run / "vocabulary" / "source.model" for run in ("run", "next")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("begin", ["checkpoint.resume", "checkpoint.init_from"])
def test_another_vocabulary_is_refused_before_text_is_prepared_with_advice_that_works(
    begin: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, words = stores(folder), [f"{begin}={folder / 'run'}", "data.source_vocabulary=200", "trainer.steps=2"]
    words.append("checkpoint.allow_changes=[data,model]")
    assert trained(folder, "other", *words) == 2
    said = capsys.readouterr().err
    assert "has another vocabulary (" in said and "source_vocabulary=150 there, 200 here" in said
    assert f"data.tokenizer={folder / 'run'}" in said and stores(folder) == before
    words.remove("data.source_vocabulary=200")
    assert trained(folder, begin, *words, f"data.tokenizer={folder / 'run'}", "data.pair=sw") == 0
