"""Tests runs whose pipeline the planner chooses (`pipeline=auto`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from inline_run import train_inline
from own_plan import planned

from gpipe_cli.commands import train, verify

CPU = ("plan.device=a10", "plan.kernels=cpu")
TINY = ("debug=tiny", "model=transformer_lm_small", "model.L=2", "checkpoint.every=2")


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if "loss" in event]


def test_a_run_trains_with_what_was_chosen_as_with_the_same_keys_typed(tmp_path: Path) -> None:
    words = (*TINY, "pipeline=auto", "pipeline.M=auto")
    _, events = train_inline(tmp_path / "auto", *words)
    (chosen,) = (event["keys"] for event in events if event["kind"] == "chosen")
    assert {*chosen} >= {"pipeline.K", "pipeline.M", "pipeline.schedule", "pipeline.partition", "pipeline.workers"}
    typed = [f"{key}={str(value).replace(' ', '')}" for key, value in chosen.items()]
    _, again = train_inline(tmp_path / "typed", *TINY, *typed)
    assert losses(again) == losses(events) != []
    assert not any(event["kind"] == "chosen" for event in again)


def test_what_was_chosen_is_recorded_and_a_resume_keeps_what_results_depend_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*TINY, "lr_schedule=constant", "pipeline=auto", "pipeline.M=auto", "pipeline.replicas=auto"]
    words.append(f"hydra.run.dir={run}")
    assert train.main([*words, "trainer.steps=2"]) == 0
    chosen = yaml.safe_load((run / ".hydra" / "chosen.yaml").read_text())
    assert train.main([*words, "trainer.steps=4", "checkpoint.resume=auto"]) == 0
    later = yaml.safe_load((run / ".hydra" / "chosen.yaml").read_text())
    assert not {"pipeline.M", "pipeline.replicas", "pipeline.schedule"} & {*later}
    assert later["pipeline.workers"] == chosen["pipeline.workers"]


def test_other_commands_do_not_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([*TINY, "pipeline.K=auto", f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert "pipeline.K=auto: gpipe-train and gpipe-plan choose these, type values here" in capsys.readouterr().err


def test_graphs_are_kept_by_the_memory_and_change_no_loss(tmp_path: Path) -> None:
    words = (*TINY, "pipeline.K=4", "pipeline.M=4", "pipeline.workers=1")
    most, least = (planned(*words, f"pipeline.remat={remat}", *CPU).memory for remat in ("never", "always"))
    _, events = train_inline(tmp_path / "auto", *words, "pipeline.remat=auto", f"pipeline.memory={(most + least) / 2}")
    (chosen,) = (event["keys"] for event in events if event["kind"] == "chosen")
    assert sorted(chosen) == ["pipeline.keep", "pipeline.partition"] and 0 < min(chosen["pipeline.keep"]) < 4
    _, again = train_inline(tmp_path / "always", *words, "pipeline.remat=always")
    assert losses(again) == losses(events) != []
