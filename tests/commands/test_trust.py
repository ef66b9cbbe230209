"""Tests that opening anybody's checkpoint calls nothing but what is ours and what the person has named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from inline_run import train_inline
from own_model import WORDS

from gpipe_cli.commands import eval as evaluate
from gpipe_cli.commands import translate
from gpipe_cli.jobs.trust import OURS, SECTIONS

CONF = Path(__file__).parents[2] / "conf"
INLINE = ("launch.inline=true", "pipeline.workers=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run of a user's own model."""
    folder = tmp_path_factory.mktemp("run")
    train_inline(folder, *WORDS, "++model.middle=Tanh", "trainer.steps=1")
    return folder


def with_configuration(run: Path, folder: Path, changes: Mapping[str, Any]) -> Path:
    """Copies the run and changes its manifest, by dotted keys; the model is one of ours."""
    copy = folder / "copy"
    shutil.copytree(run, copy)
    (manifest,) = copy.glob("checkpoints/*/manifest.json")
    said = json.loads(manifest.read_text())
    ours = {"model._target_": "gpipe_cli.models.amoebanet.amoebanet"}
    for key, value in {**ours, **changes}.items():
        section = said["state"]["configuration"]
        *above, last = key.split(".")
        for name in above:
            section = section[name]
        section[last] = value
    manifest.write_text(json.dumps(said))
    return copy


@pytest.mark.parametrize(
    ("command", "key"),
    [(translate.main, "model"), *((evaluate.main, key) for key in ("model", "data", "task", "task.x", "data.list"))],
)
def test_a_function_named_in_a_manifest_is_not_called(
    command: Any, key: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "copied"
    call = {"_target_": "shutil.copy", "src": __file__, "dst": str(copied)}
    changed = with_configuration(run, tmp_path, {key: [[call]] if key == "data.list" else call})
    assert command([f"checkpoint={changed}", *INLINE]) == 2
    said = capsys.readouterr().err
    assert "wants to call shutil.copy" in said and "type trust=[shutil.copy]" in said
    assert not copied.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"task._target_": "gpipe_cli.data.images.digits.Path.unlink"},
            "wants to call gpipe_cli.data.images.digits.Path.unlink",
        ),
        ({"pipeline.M": "auto", "model._target_": "os.abort"}, "wants to call os.abort"),
        ({"data.x": "${oc.decode:'{_target_: os.abort}'}"}, "no run writes ${…} there"),
        ({"data.x": r"\${oc.decode:'{_target_: os.abort}'}"}, "no run writes ${…} there"),
    ],
)
def test_a_manifest_cannot_hide_what_it_wants_to_call(
    changes: dict[str, Any], message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = with_configuration(run, tmp_path, changes)
    assert evaluate.main([f"checkpoint={changed}", *INLINE]) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_ones_own_model_is_evaluated_once_it_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([f"checkpoint={run}", *INLINE]) == 2
    advice = re.search(r"type (trust=\S+)", capsys.readouterr().err)
    assert advice is not None and advice[1] == "trust=[own_model.layers]"
    assert evaluate.main([f"checkpoint={run}", *INLINE, advice[1]]) == 0
    typed = ["model._target_=own_model.layers", "model.middle=Tanh"]
    assert evaluate.main([f"checkpoint={run}", *INLINE, *typed]) == 0


def test_whatever_a_configuration_of_ours_calls_is_ours() -> None:
    files = [path for section in SECTIONS for path in (CONF / section).glob("*.yaml")]
    named = {name for path in files for name in re.findall(r"_target_: *([\w.]+)", path.read_text())}
    assert named and named <= OURS
