"""Tests that the values of shipped targets are checked against their signatures, and all wrong ones told at once."""

import pytest
from composed import composed
from refusals import refusal_of

from gpipe_cli.config import Settings
from gpipe_cli.factory.build import refuse_wrong_values

INTEGER, LEAST = "should be a valid integer", "should be greater than or equal to"


def refusal(*words: str) -> str:
    return refusal_of(lambda: refuse_wrong_values(Settings.from_config(composed(*words))))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.L=0"], f"model.L=0: {LEAST} 1"),
        (["model.A=true"], f"model.A=true: {INTEGER}"),
        (["model.A='2'"], f'model.A="2": {INTEGER}'),
        (["model.d_model=15"], "model.d_model=15: should be a multiple of 2"),
        (["model.dropout=1.0"], "model.dropout=1.0: should be less than 1"),
        (["data.languages=7"], "data.languages=7: use a list or null"),
        (["data.languages=[de,false]"], "data.languages=[de,false]: should be a valid string or null; YAML reads no"),
        (["task.logit_clip=0"], "task.logit_clip=0: should be greater than 0 or null"),
        (["optimizer=rmsprop_tf", "optimizer.eps=-1"], f"optimizer.eps=-1: {LEAST} 0"),
        (["lr_schedule=cosine", "lr_schedule.steps=null"], f"lr_schedule.steps=null: {INTEGER}"),
        (["model=amoebanet", "data=digits", "data.batch_size=1438"], "data.batch_size=1438: should be less than or"),
    ],
    ids=str,
)
def test_a_wrong_value_is_told_in_one_line(words: list[str], said: str) -> None:
    assert refusal(*words).startswith(said)
    assert "\n" not in refusal(*words)


def test_the_wrong_values_of_all_sections_are_told_at_once() -> None:
    assert refusal("model.L=0", "data.max_length=x", "task.pad_id=x").count("\n") == 2


@pytest.mark.parametrize("words", [["data.temperature=inf"], ["data.max_length=1e2"], ["model.dropout=0"]], ids=str)
def test_infinity_and_whole_numbers_written_otherwise_pass(words: list[str]) -> None:
    refuse_wrong_values(Settings.from_config(composed(*words)))
