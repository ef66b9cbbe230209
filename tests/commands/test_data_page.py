"""Tests that the examples of docs/data.md work as printed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from processes import run, succeeded

from gpipe_cli.factory.build import build_source

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## Your own source") :]


def block(language: str, text: str = SECTION) -> str:
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_the_source_of_the_page_trains_as_printed(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(block("python"))
    words = shlex.split(block("sh").replace("\\\n", " "))[1:]
    words += ["hydra.run.dir=run", "launch.inline=true", "logging.tensorboard=false"]
    succeeded(run(Path(sys.executable).with_name("gpipe-train"), *words, cwd=tmp_path))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]["nll"] < 0.5


def test_the_yaml_of_data_sets_makes_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_data.py").write_text("def MyDataset(split):\n    return [(0.5, 1)] * 64\n")
    monkeypatch.syspath_prepend(tmp_path)
    section = yaml.safe_load(block("yaml", PAGE)) | {"seed": 1, "workers": 0}
    ((inputs,), (targets,)) = next(build_source(section, 0).train(None, 4, 0, 1)).micro_batches[0]
    assert torch.equal(targets, torch.ones(16, dtype=torch.int64)) and len(inputs) == 16
