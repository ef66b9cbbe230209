"""A run goes on with more steps than it was begun with only where that changes nothing of what has been trained."""

from __future__ import annotations

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
