"""Tests that wrong command lines are refused in one screen that names the mistake."""

from __future__ import annotations

import shlex
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
from omegaconf import OmegaConf

from benchmarks.reliability.wrong_configurations import CASES, SCREEN, SHELLS, faults, run
from gpipe_cli.commands import train
from gpipe_cli.config import Settings
from gpipe_cli.errors import ConfigurationError, Problems
from gpipe_cli.jobs.composition import plain_values
from gpipe_cli.terminal.frame import one_screen
from gpipe_cli.terminal.hydra_errors import no_such_option

OUTSIDE = [*CASES][::7] + [case for case in CASES if case.startswith("gone")]
INSIDE = [case for case in CASES if case.partition(" ")[0] not in SHELLS and "--config-dir" not in case][1::3]


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


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))])


@pytest.mark.parametrize(
    ("text", "said"), [("a: &a\n  b: *a\n", "this value holds itself"), (BOMB, "stand for more than 10,000 values")]
)
def test_yaml_without_end_is_refused_with_its_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(text)
    assert train.main([f"--config-dir={tmp_path}", "model=mine"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and 'model/mine.yaml", line 1' in line


def test_aliases_in_a_configuration_are_allowed() -> None:
    assert yaml.safe_load("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n")["c"] == {"x": 1, "y": 2}


def test_a_long_answer_fits_one_screen_and_says_how_much_is_left_out() -> None:
    lines = one_screen("\n".join(f"problem {number}" for number in range(100))).splitlines()
    assert (len(lines), lines[-1]) == (SCREEN, "… and 77 more")


def test_problems_are_collected_and_told_once() -> None:
    problems = Problems(["b"])
    with problems.collected():
        raise ConfigurationError("a")
    with pytest.raises(ConfigurationError, match=r"^b\na$"):
        Problems([*problems, "a"]).refuse()


def test_a_value_that_refers_to_nothing_is_told_once() -> None:
    problems = Problems()
    references = {"name": "${nothing}", "seed": "${oc.env:NOT_SET_ANYWHERE}", "trainer": {"steps": "${trainer.no}"}}
    Settings.read(plain_values(OmegaConf.create(references), problems), problems)
    for key in ("name", "seed", "trainer.steps"):
        assert sum(problem.startswith((f"{key} ", f"{key}:")) for problem in problems) == 1
    assert "trainer.epochs is missing: every key of trainer needs a value" in problems


def test_wrong_values_leave_out_the_checks_that_need_them() -> None:
    problems = Problems()
    Settings.read({"pipeline": {"K": 0, "workers": 5}, "trainer": 3}, problems)
    assert "pipeline.K=0: use a whole number, at least 1" in problems
    assert "trainer must be a section with keys, not 3" in problems
    assert not any("a worker needs at least one cell" in problem for problem in problems)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer=[adam,sgd]"], "optimizer=[adam,sgd]: optimizer has one option, without brackets"),
        (["name='${os.environ}'"], "name is taken from os.environ, and there is no such key: type name=…"),
        (["=3"], "=3: write key=value"),
        (["hydra.run.dir="], "hydra.run.dir= is empty: name a folder, or leave it out"),
        (["--config-dir", ".", "--config-name", "bad"], "bad.yaml, line 1: not UTF-8"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_the_answer_is_one_line_and_no_more(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / ".hydra").mkdir(parents=True)
    (tmp_path / "runs" / ".hydra" / "overrides.yaml").write_text("- optimizer.lr=3\n")  # of an earlier run
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00a")
    with suppress(SystemExit):
        import_module("gpipe_cli.commands.train").main(words)
    written = capsys.readouterr().err
    assert said in written and written.count("\n") == 1


def test_a_launcher_that_is_not_installed_is_named_with_what_installs_it() -> None:
    assert "pip install 'gpipe-cli[slurm]'" in no_such_option("hydra/launcher", "submitit_slurm", ["basic"])
