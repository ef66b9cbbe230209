"""Tests that timed profiles are measured once, unless something that they depend on has changed."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from composed import checked
from inline_run import train_inline

from gpipe_cli.commands import plan
from gpipe_cli.factory.build import build_model
from gpipe_cli.partition.cost import LayerTimes
from gpipe_cli.planner.measure.kept_profile import profiled

CPU = torch.device("cpu")


def profile(cache: Path, *words: str, batch: int = 2) -> tuple[list[LayerTimes], str]:
    """Returns the times of a tiny language model's layers, and the messages about them."""
    common = ["model=transformer_lm_small", "debug=tiny", "data.vocabulary=50", "model.L=1", "launch.inline=true"]
    settings = checked(*common, *words).settings
    said: list[str] = []
    ids = (torch.ones(batch, 5, dtype=torch.int64),)
    with mock.patch.dict(os.environ, GPIPE_CACHE=str(cache)):
        times = profiled(build_model(settings.model), (ids, ids), settings, CPU, said.append).layers
    return times, said[0]


def test_a_profile_is_measured_once(tmp_path: Path) -> None:
    first, said = profile(tmp_path)
    (file,) = (tmp_path / "profiles").glob("*.json")
    assert "measured in" in said and said.endswith(f"kept in {file}")
    second, said = profile(tmp_path)
    assert f"from {file}" in said and json.loads(file.read_text())["loss"]["forward"] > 0
    assert first == second
    file.write_text(file.read_text()[:20])
    assert len(profile(tmp_path)[0]) == len(first)  # a damaged one is measured anew


@pytest.mark.parametrize("change", [{"words": ["model.H=48"]}, {"batch": 3}, {"words": ["precision=bf16"]}])
def test_another_model_shape_or_precision_is_measured_anew(change: dict[str, Any], tmp_path: Path) -> None:
    profile(tmp_path)
    assert "measured in" in profile(tmp_path, *change.get("words", []), batch=change.get("batch", 2))[1]
    assert len(list((tmp_path / "profiles").glob("*.json"))) == 2


PLANNED = ("model=transformer_lm_small", "debug=tiny", "model.L=1", "pipeline.cost=profile")


def notes_of_a_plan(*words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert plan.main([*PLANNED, *words, "plan.format=json"]) == 0
    notes: list[str] = json.loads(capsys.readouterr().out)["notes"]
    return notes


def test_a_run_and_a_plan_of_this_machine_cut_by_one_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPIPE_CACHE", str(tmp_path))
    assert not notes_of_a_plan(capsys=capsys)
    assert not (tmp_path / "profiles").exists()
    notes = notes_of_a_plan("plan.device=this", capsys=capsys)
    (file,) = (tmp_path / "profiles").glob("*.json")
    assert notes[0].endswith(f"kept in {file}")
    _, events = train_inline(tmp_path / "run", *PLANNED, "trainer.steps=1", "pipeline.workers=1")
    assert any(f"from {file}" in event["text"] for event in events if event["kind"] == "message")
