"""Tests that all commands answer --help with a page and use the same exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch.report import WorkerFailed
from gpipe_cli.terminal.frame import exit_code

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with `build`, which the tests need anyway

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
COMMANDS: dict[str, str] = PROJECT["project"]["scripts"]
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


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigurationError("no"), 2, "gpipe-x: no\n"),
        (WorkerFailed("worker 1 died"), 1, "worker 1 died\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_a_command_ends(error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise error

    assert exit_code("gpipe-x", work) == code
    assert capsys.readouterr().err == said
    assert exit_code("gpipe-x", lambda: 7) == 7
