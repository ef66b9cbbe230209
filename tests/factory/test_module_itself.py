"""Tests the comparison of a traced module with the module itself: by gpipe-verify, and when a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from inline_run import train_inline

from benchmarks.reliability.planted_faults.run import verified
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory import module_itself
from gpipe_cli.factory.build import build_model, build_task
from gpipe_cli.factory.module_itself import compare_with_module, quick_look
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.models.traced import compare

SECTION: dict[str, Any] = {
    "_target_": "gpipe_cli.models.traced.layers.layers",
    "module": {"_target_": "own_module.Noisy", "_partial_": True},
    "example": [["float32", [4, 3, 8, 8]]],
}
TASK = build_task({"_target_": "gpipe_cli.tasks.classification.ClassificationTask"})
WORDS = ["model=module", "model.module._target_=own_module.other_when_real", "data.batch_size=8", "trainer.steps=2"]
DIFFERS = "output after an update of micro-batch 0: relative difference"


def micro_batch() -> MicroBatch:
    return (torch.randn(4, 3, 8, 8),), (torch.arange(4),)


def looked() -> str:
    """Returns what the quick look says."""
    said: list[str] = []
    quick_look(build_model(SECTION), TASK, micro_batch(), said.append)
    (line,) = said
    return line


def test_a_start_compares_a_module_with_itself() -> None:
    assert looked().startswith("the module itself: the same bits (40 outputs")


def test_a_start_of_a_large_module_says_how_to_compare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_itself, "LONGEST", 0.0)
    assert "too large for a quick look" in (line := looked()) and "gpipe-verify" in line


def test_a_difference_refuses_the_run_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        train_inline(tmp_path / "run", *WORDS)
    for said in ("model.module._target_=own_module.other_when_real", DIFFERS, "write the model as a list of layers"):
        assert said in str(refusal.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_module_that_does_not_fit_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_itself, "free_memory", lambda: 1000)
    report = compare_with_module(build_model(SECTION), [micro_batch()], TASK)
    assert report.agrees is None and "a smaller one with the same code" in report.line


def test_gpipe_verify_compares_with_the_module_itself(tmp_path: Path) -> None:
    report = verified(tmp_path, *WORDS, "pipeline.K=2", "pipeline.M=2", subject=False)
    assert not report["agrees"]
    assert report["verdict"].startswith("DIFFERENT: the traced layers do not compute what the module itself does")
    assert "the module itself: DIFFERENT in" in report["notes"][0] and "output of micro-batch 1" in report["notes"][0]


def test_a_module_that_fails_where_its_layers_do_not_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("not a number")

    monkeypatch.setattr(compare, "run_module", fail)
    report = compare_with_module(build_model(SECTION), [micro_batch()], TASK)
    assert report.agrees is False and "the module itself fails" in report.line and "not a number" in report.line
