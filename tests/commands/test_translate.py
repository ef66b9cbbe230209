"""Tests gpipe-translate and gpipe-generate: lines in, texts out, in order, by any number of cells; with overrides."""

import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from inline_run import train_inline
from run_files import rows

from gpipe_cli.commands import generate, translate
from gpipe_cli.jobs import reopen
from gpipe_cli.terminal.command import Words

Capture = pytest.CaptureFixture[str]
INLINE = ["launch.inline=true", "pipeline.workers=1"]
LINES = ["viernes, 4 de mayo", "", "hace 23 años", "   ", "lunes", "Alemania y Francia", "12 kilómetros", "Europa"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run that has learned nothing; its translations are nonsense, but differ from line to line."""
    run_dir = tmp_path_factory.mktemp("run")
    words = ["debug=tiny", "pipeline.K=3", "pipeline.partition=[5,10,5]", "trainer.steps=1", "task.generation.group=2"]
    train_inline(run_dir, *words, "task.generation.max_length=9", "trainer.evaluate_every=null", "pipeline.M=2")
    return run_dir


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "source.txt"
    path.write_text("".join(f"{line}\n" for line in LINES))
    return path


@pytest.fixture(scope="module")
def reference(run: Path, source: Path) -> list[str]:
    """Returns the translations of `LINES` by one cell in this process."""
    return translated(run, source, *INLINE, "pipeline.K=1")


def test_translations_that_were_cut_are_counted(run: Path, source: Path, reference: list[str], capsys: Capture) -> None:
    assert rows(run / "evaluations.jsonl")[-1]["cut_translations"] > 9  # of a model that has learned nothing
    assert translated(run, source, *INLINE, "task.generation.max_length=1") != reference
    assert "length_extra limit its tokens: 6 lines\n" in capsys.readouterr().err


def translated(run: Path, source: Path, *words: str) -> list[str]:
    with source.open() as lines, source.with_suffix(".translated").open("w+") as output:
        with patch.object(sys, "stdin", lines), redirect_stdout(output):
            assert translate.main([f"checkpoint={run}", *words]) == 0
        text = Path(output.name).read_text()
    assert text.endswith("\n")
    return text[:-1].split("\n")


def test_each_line_has_its_translation_in_its_place(run: Path, tmp_path: Path, reference: list[str]) -> None:
    assert len(reference) == len(LINES)
    said = [text for line, text in zip(LINES, reference, strict=True) if line.strip()]
    assert [text for line, text in zip(LINES, reference, strict=True) if not line.strip()] == ["", ""]
    assert all(said) and len(set(said)) == len(said), "the model says the same to everything: the tests see nothing"
    turned = tmp_path / "turned.txt"
    turned.write_text("\n".join(reversed(LINES)))  # and no newline at the end
    assert translated(run, turned, *INLINE) == reference[::-1]


def test_four_cells_on_three_workers_say_the_same(run: Path, source: Path, reference: list[str]) -> None:
    assert translated(run, source, "pipeline.K=4", "pipeline.workers=3") == reference


def test_a_run_translates_where_its_data_is_not(
    run: Path, source: Path, reference: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, nothing = tmp_path / "moved", tmp_path / "cache"
    shutil.copytree(run, moved)
    monkeypatch.setenv("GPIPE_CACHE", str(nothing))
    assert translated(moved, source, *INLINE) == reference
    assert not nothing.exists()


@pytest.mark.slow
def test_a_line_is_answered_before_the_input_ends_and_nothing_else_printed(run: Path, reference: list[str]) -> None:
    words = [sys.executable, "-m", "gpipe_cli.commands.translate", f"checkpoint={run}", *INLINE]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for number in (0, 2):
            process.stdin.write(f"{LINES[number]}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{reference[number]}\n"
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait() == 0


NO_GENERATION = "no section generation, so it does not translate; texts are continued by gpipe-generate"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint={run}", "lunes"], "one run, not lunes, "),
        (["checkpoint={run}", "step=77"], "no checkpoint of step 77; it has kept: 1"),
        (["checkpoint={run}", "task.generation=null"], NO_GENERATION),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_call_is_told(words: list[str], message: str, run: Path, capsys: Capture) -> None:
    assert translate.main([word.format(run=run) for word in words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out


# -- opening a run again ---------------------------------------------------------------------------------------------


def test_overrides_change_the_configuration_that_the_checkpoint_was_made_with(run: Path) -> None:
    opened = reopen.open_run(str(run), Words(["pipeline.K=2", "precision=bf16", "task.generation.beam=3"]))
    settings = opened.prepared.settings
    assert (opened.info.run_dir, opened.info.step) == (run, 1)
    assert (settings.pipeline.K, settings.precision.autocast, settings.task["generation"]["beam"]) == (2, "bfloat16", 3)
    assert settings.model == reopen.open_run(str(run), Words()).prepared.settings.model
    assert settings.pipeline.partition == "auto"  # the run's sizes were for three cells


# --- input and vocabularies made to hurt


def test_a_line_of_too_many_tokens_is_not_answered_and_told(
    run: Path, reference: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("gpipe_cli.inference.lines.MOST_TOKENS", 100)
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join([LINES[0], "1" * 200, LINES[4]]))
    assert translated(run, lines, *INLINE) == [reference[0], "", reference[4]]
    assert "not answered, because they have more than 100 tokens: 1 line\n" in capsys.readouterr().err


def test_a_changed_vocabulary_is_refused_in_one_line(run: Path, tmp_path: Path, capsys: Capture) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    path = moved / "vocabulary" / "source.model"
    path.write_bytes(path.read_bytes().replace(b"lunes", b"LUNES") + b"\n")
    assert translate.main([f"checkpoint={moved}", *INLINE]) != 0
    printed = capsys.readouterr().err
    assert "is another vocabulary than" in printed and "Traceback" not in printed


# -- gpipe-generate --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a language model on text of its own for one step; what it says is nonsense."""
    folder = tmp_path_factory.mktemp("lm_run")
    lines = [f"{number} {one} on the {two}" for number, (one, two) in enumerate([("cat", "mat"), ("dog", "log")] * 99)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    words = ["debug=tiny", "model=transformer_lm", "model.L=1", "data=text", f"data.root={folder / 'text.txt'}"]
    words += ["data.vocabulary=60", f"data.cache_dir={folder / 'cache'}", "trainer.steps=1", "pipeline.K=2"]
    train_inline(folder / "lm_run", *words, "trainer.evaluate_every=null", "data.held_out=0.1", "pipeline.M=2")
    (folder / "text.txt").unlink()
    return folder / "lm_run"


def continued(lm_run: Path, capsys: Capture, *words: str, lines: str = os.devnull) -> list[str]:
    with Path(lines).open() as beginnings, patch.object(sys, "stdin", beginnings):
        assert generate.main([f"checkpoint={lm_run}", "length=6", *INLINE, *words]) == 0
    text = capsys.readouterr().out
    assert text.endswith("\n")
    return text[:-1].split("\n")


def test_each_beginning_has_its_text_at_any_K(lm_run: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "lines.txt").write_text("7 cat on\n\n8 dog\n")
    answered = partial(continued, lm_run, capsys, "seed=3", "temperature=2", "samples=2", lines=f"{tmp_path}/lines.txt")
    found = answered()
    assert len(set(found)) == 6
    begins = ["7 cat on", "", "8 dog"]
    assert [text[: len(begin)] for text, begin in zip(found[::2], begins, strict=True)] == begins
    assert answered("pipeline.K=3", "pipeline.M=3") == found
    scored = answered("scores=true")
    assert [line.partition("\t")[2] for line in scored] == found
    assert all(float(line.partition("\t")[0]) < 0 for line in scored)


def test_a_prompt_may_be_empty_and_greedy_needs_no_seed(lm_run: Path, capsys: Capture) -> None:
    greedy = ("prompt=", "temperature=0")
    assert continued(lm_run, capsys, *greedy) == continued(lm_run, capsys, *greedy, "seed=9")
    assert continued(lm_run, capsys, "prompt=7 cat = 8", "top_k=1")[0].startswith("7 cat")
    assert continued(lm_run, capsys, "prompt=7 \udcff", "top_k=1")[0].startswith("7")  # a byte that is not UTF-8


def test_a_run_that_translates_is_sent_to_the_other_command(run: Path, capsys: Capture) -> None:
    assert generate.main([str(run), "prompt="]) == 2
    assert "use gpipe-translate" in capsys.readouterr().err
