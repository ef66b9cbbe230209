"""Tests the comparison of a traced module with the module itself: by gpipe-verify, and when a run starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from composed import checked
from inline_run import train_inline
from planted_faults import verified
from refusals import refusal_of

from gpipe_cli.comparison import at_start
from gpipe_cli.comparison.at_start import compare_at_start, given_by
from gpipe_cli.config import Settings
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.build import build_model, build_task

SECTION: dict[str, Any] = {
    "_target_": "gpipe_cli.models.traced.layers.layers",
    "module": {"_target_": "own_module.Noisy", "_partial_": True},
    "example": [["float32", [4, 3, 8, 8]]],
}
DIFFERS = "call 2, training: output: relative difference"
WORDS = ["model=module", "model.module._target_=own_module.other_when_real", "data.batch_size=8", "trainer.steps=2"]


@pytest.fixture
def settings() -> Settings:
    return checked("model=module", "model.module._target_=own_module.Noisy").settings


def started(settings: Settings, **more: Any) -> str:
    """Returns what a start says of the comparison."""
    said: list[str] = []
    given = given_by(settings, build_task(settings.task), [((torch.randn(4, 3, 8, 8),), (torch.arange(4),))])
    compare_at_start(build_model({**SECTION, **more}), given, said.append)
    (line,) = said
    return line


def test_a_start_compares_a_module_with_itself(settings: Settings) -> None:
    line = started(settings)
    assert line.startswith("the module itself: the same ") and "updated weights" in line


def test_a_difference_refuses_the_run_before_it_trains(tmp_path: Path) -> None:
    told = refusal_of(train_inline, tmp_path / "run", *WORDS)
    assert "model.module._target_=own_module.other_when_real" in told
    assert DIFFERS in told and "write the model as a list of layers" in told
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_module_that_is_not_compared_trains_only_if_it_is_trusted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_start, "free_memory", lambda: 1000)
    told = refusal_of(started, settings)
    assert "own_module.Noisy: not compared with its layers: 8 times its" in told and "model.trust=true" in told
    assert started(settings, trust=True) == "the module itself: not compared, as model.trust=true says"


def test_gpipe_verify_compares_with_the_module_itself(tmp_path: Path) -> None:
    told = refusal_of(verified, tmp_path, *WORDS, "pipeline.K=2", "pipeline.M=2", subject=False)
    assert "do not compute what the module itself does: DIFFERENT in" in told and DIFFERS in told


def test_a_run_refuses_micro_batches_of_one_example_where_the_module_treats_them_otherwise(tmp_path: Path) -> None:
    words = ["model=module", "model.module._target_=own_module.AloneInImages", "pipeline.M=2", "trainer.steps=1"]
    summary, _ = train_inline(tmp_path / "two", *words, "data.batch_size=4", "trainer.evaluate_every=null")
    assert summary["steps"] == 1
    with pytest.raises(ConfigurationError, match=r"own_module\.AloneInImages: its layers, traced, do not compute"):
        train_inline(tmp_path / "one", *words, "data.batch_size=3")
