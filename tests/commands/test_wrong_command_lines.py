"""Tests that wrong command lines are refused in one screen that names the mistake."""

from __future__ import annotations

import shlex
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.reliability.wrong_configurations import CASES, faults, run

OUTSIDE = [*CASES][::7]
INSIDE = [case for case in CASES if case not in OUTSIDE]


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_real_command_refuses_a_wrong_command_line(case: str, tmp_path: Path) -> None:
    assert run(case, tmp_path)["wrong"] == ""


@pytest.mark.parametrize("case", INSIDE)
def test_the_answer_names_the_mistake(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *words = shlex.split(case)
    try:
        code = import_module(f"gpipe_cli.commands.{command}").main(words)
    except SystemExit as end:
        code = end.code
    written = capsys.readouterr()
    assert faults(case, code, written.out + written.err) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["name='${os.environ}'"], "name: Interpolation key 'os.environ' not found"),
        (["hydra.run.dir="], "hydra.run.dir= is empty: name a folder, or leave it out"),
        (["data._target_=my_module.Images"], "model.source_vocabulary: Interpolation key 'data.vocabulary' not found"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_the_answer_is_one_line_and_no_more(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with suppress(SystemExit):
        import_module("gpipe_cli.commands.train").main(words)
    written = capsys.readouterr().err
    assert said in written and written.count("\n") == 1
