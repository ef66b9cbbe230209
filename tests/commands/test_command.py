"""Tests that all commands answer --help with a page, at once, and read one grammar of words."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path

import pytest

from gpipe_cli.terminal.command import Words, read_words

COMMANDS = {one.name: one.value for one in distribution("gpipe-cli").entry_points}
RUN_WITHOUT_WORDS = ("gpipe-train", "gpipe-verify", "gpipe-plan")


def command(name: str) -> Callable[[list[str]], int]:
    module, _, function = COMMANDS[name].partition(":")
    main: Callable[[list[str]], int] = getattr(import_module(module), function)
    return main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_page_that_begins_with_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(name)(["--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(name)
    assert command(name)(["key=value", "-h"]) == 0
    assert capsys.readouterr().out == page


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in RUN_WITHOUT_WORDS])
def test_a_command_that_needs_words_shows_its_page_without(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(name)([]) == 2
    assert capsys.readouterr().out.startswith(name)


@pytest.mark.parametrize("run", ["0_pipeline.K=1", "sweeps/today/0_pipeline.K=1", "runs/NAME"])
def test_a_sweeps_job_folder_is_a_run(run: str) -> None:
    words = ["+task.x=1", "model@a.b=c", run, "step=best"]
    assert read_words(words, {"step": str}) == Words(["+task.x=1", "model@a.b=c"], {"step": "best"}, [run])


def test_a_run_may_have_the_name_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seed=1").mkdir()  # as hydra.job.override_dirname names a run
    monkeypatch.chdir(tmp_path)
    assert read_words(["seed=1"], overrides=False).runs == ["seed=1"] and read_words(["seed=1"]).overrides == ["seed=1"]


def test_help_lists_the_options_of_a_folder_of_the_user_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment" / "night").mkdir(parents=True)
    (tmp_path / "experiment" / "night" / "long.yaml").touch()
    assert command("gpipe-train")(["--help", f"--config-dir={tmp_path}"]) == 0
    assert f"In {tmp_path}: experiment=night/long\n" in capsys.readouterr().out


SHORT = [["train", "pipeline.k=4"], ["train", "pipeline.K=0"], ["train", "--cfg", "job"]]
SHORT += [[target.partition(":")[0].rpartition(".")[2], "--help"] for target in COMMANDS.values()]
SLOW_TO_IMPORT = {"torch", "numpy", "tensorboard", "safetensors", "sentencepiece", "babel", "rich"}
ANSWERS = """
import contextlib, io, json, sys
from importlib import import_module
imported = {}
for command, *words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            import_module(f"gpipe_cli.commands.{command}").main(words)
    imported[" ".join([command, *words])] = sorted(sys.modules)
print(json.dumps(imported))
"""


def test_short_answers_import_no_slow_library() -> None:
    """Half a second of processor time for an answer: torch alone would take two."""
    answers = sorted(SHORT, key=lambda words: words[0] == "bench")  # it has numpy; what it imports stays imported
    command = [sys.executable, "-c", ANSWERS, json.dumps(answers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = {words: SLOW_TO_IMPORT & set(names) for words, names in json.loads(done.stdout).items()}
    assert found.pop("bench --help") <= {"numpy"}
    assert {words: slow for words, slow in found.items() if slow} == {}
