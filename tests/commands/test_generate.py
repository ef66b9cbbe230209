"""Tests gpipe-generate: beginnings in, texts out, the same for any number of cells; wrong calls say what to type."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inline_run import train_inline

from gpipe_cli.commands import generate
from gpipe_cli.errors import ConfigurationError

INLINE = ["launch.inline=true", "pipeline.workers=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a language model on text of its own for one step; what it says is nonsense."""
    folder = tmp_path_factory.mktemp("run")
    lines = [f"{number} {one} on the {two}" for number, (one, two) in enumerate([("cat", "mat"), ("dog", "log")] * 99)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    words = ["debug=tiny", "model=transformer_lm", "model.L=1", "data=text", f"data.root={folder / 'text.txt'}"]
    words += ["data.vocabulary=60", f"data.cache_dir={folder / 'cache'}", "trainer.steps=1", "pipeline.K=2"]
    train_inline(folder / "run", *words, "trainer.evaluate_every=null", "data.held_out=0.1", "pipeline.M=2")
    (folder / "text.txt").unlink()
    return folder / "run"


def said(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert generate.main([f"checkpoint={run}", "length=6", *INLINE, *words]) == 0
    text = capsys.readouterr().out
    assert text.endswith("\n")
    return text[:-1].split("\n")


def test_each_beginning_has_its_text_for_every_number_of_cells(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text("7 cat on\n\n8 dog\n")
    words = [f"input={tmp_path / 'lines.txt'}", "seed=3", "temperature=2", "samples=2"]
    found = said(run, capsys, *words)
    assert len(set(found)) == 6
    begins = ["7 cat on", "", "8 dog"]
    assert [text[: len(begin)] for text, begin in zip(found[::2], begins, strict=True)] == begins
    assert said(run, capsys, *words, "pipeline.K=3", "pipeline.M=3") == found
    scored = said(run, capsys, *words, "scores=true")
    assert [line.partition("\t")[2] for line in scored] == found
    assert all(float(line.partition("\t")[0]) < 0 for line in scored)


def test_a_prompt_may_be_empty_and_greedy_needs_no_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(run, capsys, "prompt=", "temperature=0") == said(run, capsys, "prompt=", "temperature=0", "seed=9")
    assert said(run, capsys, "prompt=7 cat = 8", "top_k=1")[0].startswith("7 cat")


def test_a_run_that_translates_is_sent_to_the_other_command() -> None:
    info = SimpleNamespace(run_dir=Path("run"))
    prepared = SimpleNamespace(config={"data": {}, "task": {"generation": {"beam": 8}}})
    run: Any = SimpleNamespace(info=info, prepared=prepared)
    with pytest.raises(ConfigurationError, match="use gpipe-translate"):
        generate.worker_config(run, {})
