"""Tests a new run that begins with another's weights: the paper's transfer, end to end on tiny images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import saved
from inline_run import train_inline
from run_files import rows
from tiny_images import CLASSES, image_folder
from torch import Tensor

from gpipe_cli.checkpoint.files import CheckpointError, step_directory
from gpipe_cli.commands.train import main

TINY = ["debug=tiny", "model=amoebanet", "model.L=3", "checkpoint.every=null", "trainer.evaluate_every=null"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains the run to begin with: two steps on ten classes, with averaged weights."""
    run_dir = tmp_path_factory.mktemp("digits") / "run"
    train_inline(run_dir, *TINY, "trainer.steps=2", "trainer.average=0.9")
    return run_dir


@pytest.fixture
def birds(tmp_path: Path) -> list[str]:
    """Returns the overrides for data of three other classes."""
    image_folder(tmp_path / "birds")
    return ["data=image_folder", f"data.root={tmp_path / 'birds'}", f"data.classes={CLASSES}", "data.batch_size=8"]


def begin(run_dir: Path, origin: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains with learning rate 0, so that the weights stay those that the run began with."""
    still = ["trainer.steps=1", "optimizer.lr=0", "model.batchnorm_decay=0.999999"]
    return train_inline(run_dir, *TINY, *still, f"checkpoint.init_from={step_directory(origin, 2)}", *words)


def weights(run_dir: Path, step: int, kind: str = "weight") -> dict[str, Tensor]:
    return {name.replace(f"{kind}:", ""): value for name, value in saved(run_dir, step).items() if f"/{kind}:" in name}


@pytest.mark.slow
def test_all_but_the_classifier_comes_from_the_other_run(digits: Path, birds: list[str], tmp_path: Path) -> None:
    summary, events = begin(tmp_path / "run", digits, *birds, "checkpoint.init_except=[head]", "pipeline.K=3")
    before, after = weights(digits, 2, "average"), weights(tmp_path / "run", 1)
    assert after["head/classifier.weight"].shape[0] == CLASSES
    assert [name for name in after if not name.startswith("head") and not torch.equal(after[name], before[name])] == []
    assert any("begun anew: head" in event.get("text", "") for event in events)
    assert summary["steps"] == 1  # its own step 0, schedule and data


@pytest.mark.slow
def test_a_run_that_began_with_other_weights_is_resumed_by_the_same_words_and_does_not_begin_again(
    digits: Path, birds: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, *birds, f"checkpoint.init_from={digits}", "checkpoint.init_except=[head]", "launch.inline=true"]
    words += ["lr_schedule.steps=2", f"hydra.run.dir={tmp_path / 'run'}"]
    for steps in (1, 2):
        assert main([*words, f"trainer.steps={steps}", "checkpoint.resume=auto"]) == 0
        assert ("weights from" in capsys.readouterr().out) == (steps == 1)
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_buffers_come_along_and_the_weights_themselves_when_averages_are_not_wanted(
    digits: Path, birds: list[str], tmp_path: Path
) -> None:
    begin(tmp_path / "run", digits, *birds, "checkpoint.init_except=[head]", "checkpoint.init_average=false")
    before, after = saved(digits, 2), saved(tmp_path / "run", 1)
    for name in after:
        if name.startswith("stack_3") and "/weight:" in name:
            assert torch.equal(after[name], before[name]), name
        if name.startswith("stack_3") and "running_var" in name:
            assert torch.allclose(after[name], before[name], rtol=1e-3, atol=1e-3), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.L=6"],
            r"does not fit this model:\n.* not in it: stack_1\.1\.[^\n]*\n(.|\n)*init_except=\[stack_1\.\*\.",
        ),
        (
            ["model.D=32", "checkpoint.init_except=[head]"],
            r"have other shapes: stem(.|\n)*init_except=\[head,.*…\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(digits: Path, tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        begin(tmp_path / "run", digits, *words)
