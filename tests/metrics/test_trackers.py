"""Tests that trackers get what a run records, and can neither stop nor slow it."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inline_run import train_inline

from gpipe_cli.metrics import trackers
from gpipe_cli.metrics.trackers import Tracking

SHORT = ("debug=tiny", "task.generation=null", "checkpoint.every=null")
calls: list[tuple[str, Any]] = []


class Recorder:
    """Keeps what it is told."""

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        calls.append(("start", config["pipeline"]["M"]))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        calls.append(("log", (step, sorted(numbers))))

    def picture(self, name: str, path: Path) -> None:
        calls.append(("picture", name))

    def finish(self, summary: Mapping[str, Any]) -> None:
        calls.append(("finish", summary["steps"]))


class Broken(Recorder):
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        raise ValueError("no connection")


def test_a_tracker_gets_configuration_numbers_pictures_and_summary(tmp_path: Path) -> None:
    calls.clear()
    train_inline(tmp_path, *SHORT, "logging.trackers=[{_target_: test_trackers.Recorder}]")
    logged = dict(value for name, value in calls if name == "log")
    assert calls[0] == ("start", 4) and calls[-1] == ("finish", 4)
    assert set(logged) == {0, 1, 2, 3, 4}
    assert "evaluation/nll" in logged[0] and "train/loss" in logged[1]
    assert {value for name, value in calls if name == "picture"} == {"step"}


def test_the_error_of_a_tracker_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    summary, events = train_inline(tmp_path, *SHORT, "logging.trackers=[{_target_: test_trackers.Broken}]")
    told = [event["text"] for event in events if event["kind"] == "warning" and "tracker" in event["text"]]
    assert told == ["tracker Broken: log: ValueError: no connection; the run goes on without it"]
    assert summary["steps"] == 4


def test_a_slow_tracker_delays_no_call_and_the_end_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Recorder):
        def log(self, step: int, numbers: Mapping[str, float]) -> None:
            time.sleep(60)

    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1)
    told: list[str] = []
    tracking, began = Tracking(Slow(), told.append), time.monotonic()
    for step in range(100):
        tracking.call("log", step, {})
    tracking.finish({})
    assert time.monotonic() - began < 30
    assert told == ["tracker Slow: it did not finish within 0 s; the run goes on without it"]


def test_wandb_gets_a_whole_step_so_that_it_drops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, set[str]]] = []

    class Run(SimpleNamespace):
        """Drops what is logged for a step that is over, as wandb does; a call without a step ends the present one."""

        present = 0

        def log(self, numbers: Mapping[str, Any], step: int | None = None) -> None:
            if step is None or step >= self.present:
                self.present = self.present if step is None else step
                kept.append((self.present, set(numbers)))
                self.present += step is None

    run = Run(summary={}, finish=lambda: None, id="a1")
    module = SimpleNamespace(Settings=dict, init=lambda **_: run, Html=str, Image=str)
    monkeypatch.setitem(sys.modules, "wandb", module)
    words = ["trainer.steps=4", "trainer.evaluate_every=2", "trainer.trace_steps=[2,3]", "logging.every=1"]
    train_inline(tmp_path, *SHORT, *words, "logging.trackers=[wandb]")
    assert [step for step, numbers in kept if "train/loss" in numbers] == [1, 2, 3, 4]
    assert [step for step, numbers in kept if "evaluation/nll" in numbers] == [0, 2, 4]


def test_a_run_that_goes_on_keeps_its_id_at_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> SimpleNamespace:
        given.append((options.get("id"), options.get("resume")))
        return SimpleNamespace(id=options.get("id") or f"new{len(given)}")

    given: list[tuple[str | None, str | None]] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=dict, init=init))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    for place, resume in (("run", None), ("run", checkpoint), ("elsewhere", checkpoint), ("run", None)):
        (tmp_path / place).mkdir(exist_ok=True)
        config = {"checkpoint": {"resume": None if resume is None else str(resume)}}
        trackers.WandB().start(config, tmp_path / place)
    assert given == [(None, None), ("new1", "allow"), (None, None), (None, None)]
