"""Tests that the page of gpipe-train --help says what conf/ holds."""

from __future__ import annotations

import re

import pytest
from composed import composed
from omegaconf import OmegaConf

from gpipe_cli.commands import train
from gpipe_cli.config import FREE_FORM, known_keys
from gpipe_cli.jobs.configuration import CONF
from gpipe_cli.typed_section import shown

PAGE = train.__doc__
NO_GROUPS = ("hydra", "trainer", "__pycache__")  # what Hydra needs, and what models bring along
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name not in NO_GROUPS)


def test_it_is_short_and_has_the_defaults() -> None:
    assert len(PAGE.splitlines()) <= 48
    assert all(len(line) <= 120 for line in PAGE.splitlines())
    keys = dict(
        re.findall(r"^    ([a-z_.KM]+) {2,}(\S+)  ", PAGE.partition("Keys (")[2].partition("Groups (")[0], re.M)
    )
    config = OmegaConf.create(composed())
    assert len(keys) > 9 and keys == {key: shown(OmegaConf.select(config, key)) for key in keys}
    assert all(key in known_keys() or key.partition(".")[0] in FREE_FORM for key in keys)


@pytest.mark.parametrize("group", GROUPS)
def test_it_names_a_group_with_every_option(group: str) -> None:
    folder, words = CONF / group, set(PAGE.replace("*", "").split())
    assert f"\n    {group} " in PAGE
    paths = list(folder.rglob("*.yaml") if group == "experiment" else folder.glob("*.yaml"))
    paths = [path for path in paths if "recipe" not in path.parts]  # a part of experiments, and no option
    assert {path.relative_to(folder).with_suffix("").as_posix() for path in paths} <= words
