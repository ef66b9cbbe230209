"""Tests that gpipe-verify says OK where the pipeline is the plain loop, and names what is wrong where it is not."""

import json
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from other_device import NAME, OTHER, runs_on
from own_model import DIGITS
from planted_faults import verified
from processes import command, succeeded

from benchmarks.subject import SUBJECT
from gpipe_cli.commands import verify
from gpipe_cli.config import Kind
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.verify.plain import PlainModel


def row(report: dict[str, Any], step: int, name: str) -> dict[str, Any]:
    (quantities,) = [one["quantities"] for one in report["steps"] if one["step"] == step]
    (found,) = [quantity for quantity in quantities if quantity["name"] == name]
    return dict(found)


# -- the same ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", get_args(Kind))
def test_every_schedule_is_the_plain_loop(tmp_path: Path, schedule: str) -> None:
    report = verified(tmp_path, f"pipeline.schedule={schedule}", "pipeline.remat=always", "verify.dtype=float64")
    assert report["agrees"], report["findings"]
    assert row(report, 2, "gradients")["relative"] < 1e-12
    assert row(report, 2, "gradients")["compared"] == 13
    assert row(report, 2, "weights after")["verdict"] == "bit for bit"


def test_a_model_with_a_tied_parameter_is_the_plain_loop(tmp_path: Path) -> None:
    """Embed, judge and head share a matrix."""
    report = verified(tmp_path, "model.tied=shared", "model.batchnorm=false")
    assert report["verdict"].startswith("OK, bit for bit: the pipelined run is the plain one (2 steps, K=4, M=4")
    assert row(report, 1, "outputs recomputed")["compared"] > 0
    for name, count in {"gradients": 11, "weights after": 13}.items():
        assert row(report, 2, name)["compared"] == count


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_random_numbers_of_every_part_are_the_plain_loop_s(tmp_path: Path, schedule: str) -> None:
    """Compares the numbers of layers, loss and backward; for K=3, too: they do not depend on it."""
    words = [
        *(*DIGITS[:3], "model=custom", "model._target_=noisy_model.layers", "task._target_=noisy_model.loss"),
        *("optimizer=sgd", "optimizer.lr=0.01", "lr_schedule=constant", "pipeline.K=3"),
    ]
    report = verified(tmp_path, *words, f"pipeline.schedule={schedule}", subject=False)
    assert report["verdict"].startswith("OK"), report["findings"]
    assert row(report, 2, "weights after")["verdict"] == "bit for bit"


def test_an_update_is_compared_with_one_by_the_run_s_device(tmp_path: Path) -> None:
    """A CPU rounds otherwise than a GPU."""
    devices, update = set(), PlainModel.update

    def noted(plain: PlainModel, *given: Any) -> None:
        devices.update(weight.device for weight in plain.weights.values())
        update(plain, *given)

    with runs_on(NAME), patch.object(PlainModel, "update", noted):
        report = verified(tmp_path, "verify.steps=1", "pipeline.M=1")
    assert report["agrees"] and devices == {OTHER}, report["findings"]


SLOWER = pytest.mark.slow(2)
HALF = [("precision=bf16", "precision.boundaries=bfloat16"), ("precision=fp16", "precision.loss_scale=16777216")]


@pytest.mark.parametrize("words", HALF, ids=lambda words: words[0])
def test_half_precision_is_the_plain_loop_in_half_precision(words: tuple[str, ...], tmp_path: Path) -> None:
    report = verified(tmp_path, *words, "model.batchnorm=false")
    assert report["verdict"].startswith("OK, bit for bit")


@pytest.mark.slow
def test_compiled_layers_are_the_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    report = verified(tmp_path, "pipeline.compile=true", "pipeline.schedule=zero_bubble", "verify.steps=1")
    assert report["agrees"], report["findings"]


# -- the command, real processes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_and_replicas_agree_with_one_process(tmp_path: Path) -> None:
    words = ["pipeline.workers=2", "pipeline.replicas=2", "verify.dtype=float64"]
    run_dir = tmp_path / "run"
    said = succeeded(command("verify", f"hydra.run.dir={run_dir}", *SUBJECT, *words))
    assert "the pipelined run is the plain one" in said.splitlines()[-1]
    assert json.loads((run_dir / "verify.json").read_text())["agrees"]
    assert not (run_dir / "checkpoints").exists() and not (run_dir / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["transformer", "transformer_lm_small", pytest.param("amoebanet", marks=SLOWER)])
def test_both_families_are_the_plain_loop(family: str, tmp_path: Path) -> None:
    words = (f"hydra.run.dir={tmp_path / 'run'}", "debug=tiny", f"model={family}")
    said = succeeded(command("verify", *words, "pipeline.K=2", "pipeline.workers=2"))
    assert said.splitlines()[-1].startswith("OK")


def test_the_exit_code_of_a_difference_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch.inline=true", "model.odd=dice", "pipeline.remat=always", f"hydra.run.dir={tmp_path / 'run'}"]
    assert verify.main([*SUBJECT, *words]) == 1
    assert "DIFFERENT: " in capsys.readouterr().out


def test_json_is_all_that_standard_output_has(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["verify.format=json", "verify.steps=1", "launch.inline=true"]
    assert verify.main([*words, *SUBJECT, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["agrees"] and [step["step"] for step in report["steps"]] == [1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pipeline.sync_batchnorm=true", "pipeline.replicas=2"], "leave it out to verify everything else"),
        (["checkpoint.resume=somewhere"], "leave out checkpoint.resume"),
        (["model.odd=counter"], "layer 'counter' changes its buffer 'calls' in every training forward"),
    ],
)
def test_what_has_no_plain_counterpart_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        verified(tmp_path, *words)
