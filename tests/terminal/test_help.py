"""Tests the page of gpipe-train --help."""

from __future__ import annotations

import pytest

from gpipe_cli.config import FREE_FORM, known_keys
from gpipe_cli.terminal.help import KEYS, conf_folder, help_text

NO_GROUPS = ("hydra", "trainer", "__pycache__")  # what Hydra needs, and what models bring along
GROUPS = sorted(path.name for path in conf_folder().iterdir() if path.is_dir() and path.name not in NO_GROUPS)


def test_it_is_short_and_has_the_defaults() -> None:
    text = help_text()
    assert len(text.splitlines()) <= 48
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "transformer*  transformer_lm" in text
    assert "    pipeline.K              4  " in text


@pytest.mark.parametrize("group", GROUPS)
def test_it_names_a_group_with_every_option(group: str) -> None:
    folder, words = conf_folder() / group, set(help_text().replace("*", "").split())
    assert f"\n    {group} " in help_text()
    paths = list(folder.rglob("*.yaml") if group == "experiment" else folder.glob("*.yaml"))
    paths = [path for path in paths if "recipe" not in path.parts]  # a part of experiments, and no option
    assert {path.relative_to(folder).with_suffix("").as_posix() for path in paths} <= words


def test_every_key_in_it_can_be_typed() -> None:
    assert all(key in known_keys() or key.partition(".")[0] in FREE_FORM for key, _ in KEYS)
