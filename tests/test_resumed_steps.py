"""What may be changed when a run goes on: more steps where no layer goes by their number, the learning rate if asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from inline_run import train_inline
from own_model import WORDS

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.trainer.checkpoint_files import step_directory


def go_on(folder: Path, *words: str) -> int:
    """Trains for 1 step, goes on to 2; returns where the second run ended."""
    common = (*words, "trainer.evaluate_every=null")
    train_inline(folder / "first", *common, "trainer.steps=1")
    resume = f"checkpoint.resume={step_directory(folder / 'first', 1)}"
    summary, _ = train_inline(folder / "second", *common, "trainer.steps=2", resume)
    return int(summary["steps"])


def test_another_number_of_steps_is_refused_where_a_layer_goes_by_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        go_on(tmp_path, *WORDS, "++model.middle=Fading")
    said = str(error.value)
    assert "trainer.steps: 1 in the checkpoint, 2 now" in said and "type: trainer.steps=1" in said
    assert "what these layers do (begin_step): middle" in said


@pytest.mark.parametrize(
    "words",
    [
        (*WORDS, "++model.middle=ReLU"),
        (*WORDS, "++model.middle=Counting"),
        (*WORDS, "++model.middle=Fading", "checkpoint.allow_changes=[trainer.steps]"),
    ],
    ids=["no such layer", "a layer that counts steps", "insisted on"],
)
def test_elsewhere_a_run_may_become_longer(words: tuple[str, ...], tmp_path: Path) -> None:
    assert go_on(tmp_path, *words) == 2


def learning_rates(folder: Path, *words: str) -> list[float]:
    """Of a run's steps: two, then two more with ``words``."""
    common = (*WORDS, "trainer.evaluate_every=null", "optimizer.lr=0.1", "trainer.steps=4", "checkpoint.every=2")
    train_inline(folder / "first", *common)
    resume = f"checkpoint.resume={step_directory(folder / 'first', 2)}"
    train_inline(folder / "second", *common, *words, resume)
    rows = (folder / "second" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["lr"] for row in rows]


def test_a_learning_rate_that_may_differ_is_the_one_that_trains(tmp_path: Path) -> None:
    change = ("optimizer.lr=0.01", "checkpoint.allow_changes=[optimizer.lr]")
    assert learning_rates(tmp_path, *change) == [0.01, 0.01]


def test_a_schedule_that_may_differ_goes_on_as_if_it_had_always_been(tmp_path: Path) -> None:
    stairs = ("schedule._target_=torch.optim.lr_scheduler.StepLR", "++schedule.step_size=1", "++schedule.gamma=0.5")
    change = (*stairs, "~schedule.warmup_steps", "checkpoint.allow_changes=[schedule]")
    assert learning_rates(tmp_path, *change) == [0.025, 0.0125]
