"""Tests which changes of the configuration prevent a resume."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import get_type_hints

import golden_losses
import pytest

from gpipe_cli.checkpoint.compatibility import MAY_DIFFER, differences, require_compatible
from gpipe_cli.checkpoint.files import CheckpointError, CheckpointInfo, Json, RunState
from gpipe_cli.config import Settings
from gpipe_cli.schedule.orders import KINDS


def test_only_keys_that_matter_stand_in_the_way_of_a_resume() -> None:
    saved: dict[str, Json] = {
        "seed": 1,
        "pipeline": {"K": 2, "M": 4, "remat": "always"},
        "model": {"L": 2, "bias": True, "size": [1, 2]},
    }
    new: dict[str, Json] = {
        "seed": 1,
        "pipeline": {"K": 8, "M": 8, "workers": 4, "devices": None},
        "model": {"L": 2, "bias": 1, "size": [1, 2], "x": {}},
    }
    assert differences(saved, new) == {
        "pipeline.M": (4, 8),
        "model.bias": (True, 1),
        "model.x": ("(not set)", {}),
    }
    assert not differences(saved, new, [*MAY_DIFFER, "pipeline.M", "model"])


def test_every_typed_key_that_may_differ_exists() -> None:
    sections = get_type_hints(Settings)
    for key in MAY_DIFFER:
        section, _, name = key.partition(".")
        assert section in sections
        if name and is_dataclass(sections[section]):
            assert name in {field.name for field in fields(sections[section])}, key


@pytest.mark.parametrize("key", ["pipeline.M", "pipeline.schedule", "pipeline.threads", "pipeline.replicas", "seed"])
def test_a_key_that_changes_bits_may_not_differ(key: str) -> None:
    section, _, name = key.rpartition(".")
    saved, new = ({section: {name: value}} if section else {name: value} for value in (1, 2))
    assert list(differences(saved, new)) == [key]


def test_schedules_that_add_up_gradients_in_the_same_order_may_replace_each_other() -> None:
    """The golden losses hold that they make the same bits; the other groups make others."""
    kinds = [kind for group in golden_losses.GROUPS.values() for kind in group]
    assert sorted(kinds) == sorted(KINDS)
    for group, (saved, new) in product(golden_losses.GROUPS.values(), product(kinds, kinds)):
        if saved in group:
            differing = differences(*({"pipeline": {"schedule": kind, "M": 4}} for kind in (saved, new)))
            assert bool(differing) == (new not in group), (saved, new)


@pytest.mark.parametrize("fingerprint", [None, "digest"])
def test_data_that_lie_elsewhere_are_compared_by_their_content_where_the_checkpoint_knows_it(
    fingerprint: str | None,
) -> None:
    state = RunState(configuration={"data": {"root": "/old"}}, data_fingerprint=fingerprint)
    info = CheckpointInfo(Path("step_00000001"), 1, state, {}, {})
    with pytest.raises(CheckpointError) if fingerprint is None else nullcontext():
        require_compatible(info, {"data": {"root": "/new"}})


def test_a_refused_resume_says_what_differs_and_what_to_type() -> None:
    saved: dict[str, Json] = {"optimizer": {"lr": 1e-5, "name": "a b"}, "pipeline": {"M": 4}}
    info = CheckpointInfo(Path("step_00000001"), 1, RunState(configuration=saved), {}, {})
    now: dict[str, Json] = {"optimizer": {"lr": 0.1, "name": "a b", "eps": None}, "pipeline": {"M": 4, "K": 3}}
    with pytest.raises(CheckpointError) as caught:
        require_compatible(info, now)
    assert "optimizer.lr: 1e-05 in the checkpoint, 0.1 now" in str(caught.value)
    assert "type: optimizer.lr=1e-05 '~optimizer.eps'" in str(caught.value)
    assert "type: 'checkpoint.allow_changes=[optimizer.lr,optimizer.eps]'" in str(caught.value)
    require_compatible(info, now, ["optimizer.*"])
