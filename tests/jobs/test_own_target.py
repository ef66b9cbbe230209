"""Tests which keys stay, go or need no plus where a user names a model, data or task of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import own_model
import pytest

from gpipe_cli.commands import evaluate, plan, train
from gpipe_cli.jobs import own_target


def test_a_typed_data_target_keeps_the_batch_size() -> None:
    config = {"data": {"_target_": "mine.Data", "batch_size": 8, "languages": None}}
    assert own_target.keys_left_out(config, ["++data._target_=mine.Data"]) == {"data": ["languages"]}


def test_without_a_typed_target_no_key_is_left_out() -> None:
    config = {"model": {"_target_": "gpipe_cli.models.transformer.transformer", "L": 3}}
    assert own_target.keys_left_out(config, ["model.L=3", "pipeline.K=2"]) == {}


def test_keys_of_a_typed_target_need_no_plus() -> None:
    words = ["-m", "model._target_=mine.layers", "model.width=1,2", "+model.depth=3", "task.pad_id=0", "pipeline.K=2"]
    assert own_target.allow_new_keys(words) == [
        *("-m", "++model._target_=mine.layers", "++model.width=1,2"),
        *("+model.depth=3", "task.pad_id=0", "pipeline.K=2"),
    ]


def test_a_module_of_the_current_directory_is_called_once_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that names it does not make the directory importable: `import apex` there would run a file."""
    (tmp_path / "lies_here.py").write_text("from beside_it import layers\n")
    (tmp_path / "beside_it.py").write_text("from own_model import layers\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    before = list(sys.path)
    words = [word.replace("own_model", "lies_here") for word in own_model.WORDS]
    inline = ["launch.inline=true", "pipeline.workers=1"]
    calls = (
        (train.main, [*words, "trainer.steps=1", "pipeline.K=2", "logging.tensorboard=false", "hydra.run.dir=run"], 0),
        (plan.main, [*words, "pipeline.K=2"], 0),
        (evaluate.main, ["run"], 2),
        (evaluate.main, ["run", "trust=[lies_here.layers]"], 0),
    )
    for main, arguments, code in calls:
        monkeypatch.setattr(sys, "path", list(before))
        for name in ("lies_here", "beside_it"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        assert main([*arguments, *inline]) == code, capsys.readouterr()
        assert sys.path == ([*before, str(tmp_path)] if code == 0 else before)
