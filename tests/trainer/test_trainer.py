"""Tests the trainer: every YAML trains, what a run leaves, when it stops."""

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import own_model
import pytest
import tiny_images
import torch
from inline_run import train_inline
from processes import command
from run_files import rows
from torch import nn

from gpipe_cli.checkpoint.files import latest
from gpipe_cli.data.source import Source
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.trainer import loop

CONF = Path(__file__).parents[2] / "conf"
GROUPS = ("optimizer", "lr_schedule", "precision", "pipeline")


def options() -> list[tuple[str, ...]]:
    """Returns words that name every YAML of these groups, one of each group at a time, and both language models.

    Experiments stand in test_experiments.py and test_translation_experiments.py.
    """
    names = {group: sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in GROUPS}
    groups = [[f"{group}={name}" for name in found if name != "custom"] for group, found in names.items()]
    together = [tuple(group[number % len(group)] for group in groups) for number in range(max(map(len, groups)))]
    return [*together, ("model=transformer_lm",), ("model=transformer_lm_small",)]


@pytest.mark.parametrize("words", options(), ids=" ".join)
def test_every_yaml_trains_a_tiny_step(words: tuple[str, ...], tmp_path: Path) -> None:
    common = ["debug=tiny", "trainer.steps=1", "trainer.evaluate_first=false", "pipeline.K=2"]
    common += [] if words[0].startswith("model=transformer_lm") else ["task.generation=null"]
    summary, _ = train_inline(tmp_path, *common, *words)
    assert summary["steps"] == 1
    assert math.isfinite(summary["loss"])
    assert summary["skipped_updates"] == 0


def test_a_run_leaves_what_other_programs_rely_on(tmp_path: Path) -> None:
    _, events = train_inline(tmp_path, "debug=tiny", "pipeline.K=3", "trainer.trace_steps=3")
    shown = [event["kind"] for event in events if event["kind"] in ("evaluation", "samples")]
    assert shown == ["evaluation", *["evaluation", "samples"] * 2]  # an untrained model's translations show nothing
    steps = rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert {"loss", "lr", "grad_norm", "examples_per_second", "tokens_per_second", "flops_per_second", "bubble"} <= set(
        steps[0]
    )
    assert [row["step"] for row in rows(tmp_path / "evaluations.jsonl")] == [0, 2, 4]
    summary = json.loads((tmp_path / "summary.json").read_text())
    needed = {"steps", "loss", "wall_seconds", "first_step_seconds", "cells", "parameters"}
    assert needed | {"bubble", "bubble_predicted"} <= set(summary)
    assert [cell["cell"] for cell in summary["cells"]] == [0, 1, 2]
    assert sum(cell["parameters"] for cell in summary["cells"]) == summary["parameters"]
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {"step.svg", "step_000003.svg"}


OVERFLOW = (*own_model.WORDS, "++model.middle=Overflowing", "trainer.steps=4", "checkpoint.every=null")
OVERFLOW += ("pipeline.cost=flops", "pipeline.M=2")
CAUSE = "it began in layer 'middle' of cell 2, micro-batch 0"


def test_naming_the_layer_of_a_skipped_step_changes_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary, events = train_inline(tmp_path / "named", *OVERFLOW, "pipeline.K=3")
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    symptom = "step 2: the loss is nan, the norm of its gradient nan"
    assert warnings == [f"{symptom}; {CAUSE}; update skipped (1 so far)"]
    steps = rows(tmp_path / "named" / "metrics.jsonl")
    assert [row["step"] for row in steps if "not_finite" in row] == [2]
    assert CAUSE in steps[1]["not_finite"]
    monkeypatch.setattr(loop, "find_cause", lambda *_: "not looked for")
    unseen, _ = train_inline(tmp_path / "unseen", *OVERFLOW, "pipeline.K=3")
    assert unseen["loss"] == summary["loss"] and unseen["skipped_updates"] == 1


class Masking(nn.Module):
    """Passes its input on beside a mask."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, torch.full((len(x), 1), -math.inf)


class Masked(own_model.Overflowing):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.where(pair[1] < 0, pair[0], 0.0))


def masked_layers() -> list[LayerBuilder]:
    first, last = own_model.layers()[:2], own_model.layers()[-1]
    return [*first, LayerBuilder("mask", Masking), LayerBuilder("middle", Masked), last]


def test_a_mask_of_minus_infinity_is_not_blamed(tmp_path: Path) -> None:
    words = [*OVERFLOW, "model._target_=test_trainer.masked_layers", "pipeline.K=3", "pipeline.remat=never"]
    _, events = train_inline(tmp_path, *(word for word in words if "model.middle" not in word))
    (warning,) = [event["text"] for event in events if event["kind"] == "warning"]
    assert "it began in layer 'middle'" in warning


@pytest.mark.slow
def test_workers_of_two_replicas_find_the_layer_together(tmp_path: Path) -> None:
    words = [*OVERFLOW, "pipeline.K=3", "pipeline.workers=2", "pipeline.replicas=2", "trainer.nonfinite_limit=1"]
    done = command("train", *words, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{CAUSE} of replica 0; 1 updates in a row had to be skipped" in done.stderr
    assert CAUSE in (tmp_path / "train.log").read_text()


def test_a_time_limit_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    limits = ["trainer.steps=100000", "trainer.seconds=0.5", "trainer.evaluate_every=null"]
    summary, _ = train_inline(tmp_path, "debug=tiny", *limits)
    assert summary["stopped_by"] == "time limit"
    assert (tmp_path / "checkpoints" / f"step_{summary['steps']:08d}" / "manifest.json").is_file()


def test_early_stopping_evaluates_its_last_step_once(tmp_path: Path) -> None:
    words = (*own_model.WORDS, "trainer.evaluate_first=true", "trainer.evaluate_every=1", "trainer.patience=1")
    summary, _ = train_inline(tmp_path, *words, "optimizer.lr=0", "trainer.steps=9")
    assert summary["stopped_by"] == "early stopping"
    found = rows(tmp_path / "evaluations.jsonl")
    assert [row["step"] for row in found] == [0, 1]
    assert summary["evaluation"]["nll"] == found[-1]["nll"]
    manifest = json.loads((tmp_path / "checkpoints" / "step_00000001" / "manifest.json").read_text())
    assert manifest["state"]["scalars"]["evaluations_since_best"] == 1


def test_epochs_end_a_run_of_a_source_that_counts_them(tmp_path: Path) -> None:
    words = ["data.languages=[fr]", "data.smallest=100", "data.largest=100", "data.batch_size=25"]
    summary, _ = train_inline(tmp_path, "debug=tiny", *words, "trainer.steps=null", "trainer.epochs=1")
    assert summary["stopped_by"] == "epochs"
    assert summary["steps"] in (3, 4)


def test_epochs_without_a_source_that_counts_them_are_refused(tmp_path: Path) -> None:
    words = ["data._target_=test_trainer.Uncounted", "model.source_vocabulary=9", "model.target_vocabulary=9"]
    with pytest.raises(ConfigurationError, match=r"no method epoch\(position\)"):
        train_inline(tmp_path, *words, "trainer.epochs=1")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("pipeline.K=99", r"pipeline\.K=99 but the model has"),
        ("+optimizer.speed=3", "unexpected keyword argument 'speed'"),
        ("+lr_schedule.speed=3", "unexpected keyword argument 'speed'"),
    ],
)
def test_what_needs_no_data_is_refused_before_data_is_prepared(tmp_path: Path, word: str, message: str) -> None:
    words = ["data._target_=test_trainer.Unprepared", "model.source_vocabulary=9", "model.target_vocabulary=9"]
    with pytest.raises(ConfigurationError, match=message):
        train_inline(tmp_path, *words, word, "data.batch_size=4")


class Uncounted(Source):
    """Has no `epoch`, as a data source may."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Any: ...

    def evaluation(self, M: int) -> Any: ...


class Unprepared(Uncounted):
    """Fails when it is prepared: its corpus would take minutes."""

    def prepare(self, report: Any) -> None:
        raise AssertionError("the data was prepared")


def test_micro_batches_too_small_for_batchnorm_are_refused(tmp_path: Path) -> None:
    words = ["model=amoebanet", "model.L=3", "model.D=16", "data.batch_size=4", "pipeline.M=4"]
    with pytest.raises(ConfigurationError, match="Expected more than 1 value per channel"):
        train_inline(tmp_path, *words)


def test_an_epoch_that_would_end_with_a_single_example_for_batchnorm_is_refused_at_the_start(tmp_path: Path) -> None:
    tiny_images.image_folder(tmp_path / "images")  # of twelve training images
    words = ["model=amoebanet", "debug=tiny", "data=image_folder", f"data.root={tmp_path}/images", "data.batch_size=10"]
    words += ["pipeline.M=2", "data.workers=0", "data.classes=3", "trainer.steps=1"]
    with pytest.raises(ConfigurationError, match=r"a micro-batch of a single example.*set data\.drop_last=true"):
        train_inline(tmp_path / "refused", *words, "data.drop_last=false")
    words += ["data.drop_last=true", "trainer.evaluate_first=false"]
    assert train_inline(tmp_path / "run", *words)[0]["steps"] == 1


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_a_source_that_fails_late_costs_no_step(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = own_model.DigitsSource.train

    def two(*arguments: Any) -> Iterator[Any]:
        yield from islice(train(*arguments), 2)
        raise kind("the archive is torn")

    monkeypatch.setattr(own_model.DigitsSource, "train", two)
    words = [*own_model.WORDS, "pipeline.K=1", "checkpoint.every=2"]
    summary, _ = train_inline(tmp_path / "two", *words, "trainer.steps=2")
    assert summary["steps"] == 2 and summary["stopped_by"] == "steps"
    with pytest.raises(kind, match="the archive is torn"):
        train_inline(tmp_path / "three", *words, "trainer.steps=3")
    assert [row["step"] for row in rows(tmp_path / "three" / "metrics.jsonl")] == [1, 2]
    assert latest(tmp_path / "three")[0] is not None
