"""Tests which keys stay, go or need no plus where a user names a model, data or task of their own."""

from __future__ import annotations

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
