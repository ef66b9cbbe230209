"""Tests which changes of the configuration and of the data prevent a resume."""

from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import create_autospec

import golden_losses
import parallel_folder
import pytest
from inline_run import train_inline
from refusals import refusal_of

from gpipe_cli.checkpoint.compatibility import MAY_DIFFER, differences, require_compatible, require_same_data
from gpipe_cli.checkpoint.files import CheckpointError, CheckpointInfo, Json, RunState, find
from gpipe_cli.config import Settings
from gpipe_cli.data.source import Source
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.schedule.orders import KINDS


def test_only_keys_that_matter_stand_in_the_way_of_a_resume() -> None:
    pipelines = ({"K": 2, "M": 4, "remat": "always"}, {"K": 8, "M": 8, "workers": 4, "devices": None})
    models = ({"L": 2, "bias": True, "size": [1, 2]}, {"L": 2, "bias": 1, "size": [1, 2], "x": {}, "trust": True})
    saved, new = ({"seed": 1, "pipeline": p, "model": m} for p, m in zip(pipelines, models, strict=True))
    assert differences(saved, new) == {"pipeline.M": (4, 8), "model.bias": (True, 1), "model.x": ("(not set)", {})}
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
def test_data_that_lie_elsewhere_are_compared_by_their_content_where_it_is_known(fingerprint: str | None) -> None:
    state = RunState(configuration={"data": {"root": "/old"}}, data_fingerprint=fingerprint)
    info = CheckpointInfo(Path("step_00000001"), 1, state, {}, {})
    with pytest.raises(CheckpointError) if fingerprint is None else nullcontext():
        require_compatible(info, {"data": {"root": "/new"}})


def test_a_refused_resume_says_what_differs_and_what_to_type() -> None:
    saved: dict[str, Json] = {"optimizer": {"lr": 1e-5, "name": "a b"}, "pipeline": {"M": 4}}
    info = CheckpointInfo(Path("step_00000001"), 1, RunState(configuration=saved), {}, {})
    now: dict[str, Json] = {"optimizer": {"lr": 0.1, "name": "a b", "eps": None}, "pipeline": {"M": 4, "K": 3}}
    said = refusal_of(require_compatible, info, now, error=CheckpointError)
    assert "optimizer.lr: 1e-05 in the checkpoint, 0.1 now" in said
    assert "type: optimizer.lr=1e-05 '~optimizer.eps'" in said
    assert "type: 'checkpoint.allow_changes=[optimizer.lr,optimizer.eps]'" in said
    require_compatible(info, now, ["optimizer.*"])


# -- data ------------------------------------------------------------------------------------------------------------


def known(fingerprint: str) -> Any:
    """Returns a source of data with this fingerprint."""
    source = create_autospec(Source, instance=True)
    source.fingerprint.return_value = fingerprint
    return source


def edit(path: Path) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]} {lines[1]} xylophone", *lines[1:]]) + "\n")


def test_other_data_are_refused_with_what_to_do_and_may_be_insisted_on(tmp_path: Path) -> None:
    same, other, state = known("one"), known("two"), RunState(data_fingerprint="one")
    saved = CheckpointInfo(tmp_path / "checkpoints" / "step_00000001", 1, state, {}, {})
    require_same_data(saved, same, [])
    said = refusal_of(require_same_data, saved, other, ["seed"])
    assert f"{saved.path} was trained on other data" in said and f"checkpoint.init_from={saved.run_dir}\n" in said
    assert "type: 'checkpoint.allow_changes=[seed,data]'" in said
    require_same_data(saved, other, ["data"])
    require_same_data(replace(saved, state=RunState()), other, [])


def test_a_run_whose_text_was_edited_does_not_go_on(tmp_path: Path) -> None:
    root, run_dir = parallel_folder.plain(tmp_path / "text"), tmp_path / "run"
    data = ("data=parallel_text", f"data.root={root}", f"data.cache_dir={tmp_path}")
    words = ("debug=tiny", *data, "trainer.evaluate_every=null", "trainer.evaluate_first=false", "task.generation=null")
    train_inline(run_dir, *words, "trainer.steps=1")
    kept = (run_dir / "vocabulary" / "source.model").read_bytes()
    edit(root / "train.de")
    with pytest.raises(ConfigurationError, match=r"source\.model is another vocabulary"):
        resume = (f"checkpoint.resume={find(run_dir)[0].path}", "checkpoint.allow_changes=[data]")
        train_inline(run_dir, *words, "trainer.steps=2", *resume)
    assert (run_dir / "vocabulary" / "source.model").read_bytes() == kept
