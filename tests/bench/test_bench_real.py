"""Tests gpipe-bench table=2 layers=real: the same work for all contenders, and models that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.bench import contenders
from gpipe_cli.bench.contenders import RealStage
from gpipe_cli.bench.steps import Workload
from gpipe_cli.bench.tables import throughput_table
from gpipe_cli.bench.throughput import PEERS, PLAIN
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.commands.bench import main
from gpipe_cli.launch.report import WorkerFailed, WorkerOutOfMemory

OURS = ["gpipe", "1f1b"]
REAL = ("table=2", "layers=real", "small=true", "models=transformer", "K=2", "batch=4", "repetitions=1")


def bench(folder: Path, *words: str) -> dict[str, Any]:
    """Runs the command in this process, its workers in their own; returns the figures that it wrote, and the text."""
    assert main([*REAL, *words, f"output={folder}"]) == 0
    figures: dict[str, Any] = json.loads((folder / "table2.json").read_text(encoding="utf-8"))
    return {**figures, "text": (folder / "table2.md").read_text(encoding="utf-8")}


@pytest.mark.parametrize(
    "remat", [pytest.param("always", marks=pytest.mark.slow), pytest.param("never", marks=pytest.mark.slow(2))]
)
def test_all_contenders_compute_the_same_gradients(remat: str) -> None:
    """The boundaries of AmoebaNet are pairs of tensors, the inputs of the Transformer are integers."""
    settings = [("transformer", 1), ("transformer", 2), ("amoebanet", 2)]
    config = {"settings": settings, "remat": remat, "contenders": [*OURS, *PEERS, PLAIN]}
    found = run_workers("bench_jobs:gradients", 2, config, throughput_table.PRELOAD)
    assert found[0]["torch 1f1b"] is None and found[0]["torch interleaved"] is None, "torch refuses M < K"
    for (family, M), norms in zip(settings, found, strict=True):
        for name in ["1f1b", *PEERS, PLAIN]:
            if (M, name) not in ((1, "torch 1f1b"), (1, "torch interleaved")):
                assert norms[name] == pytest.approx(norms["gpipe"], rel=1e-2, abs=1e-5), (family, M, name)


@pytest.mark.slow
def test_uneven_micro_batches_are_refused_by_torch_and_no_error() -> None:
    """4 examples make micro-batches of 2, 1 and 1."""
    config = {"settings": [("transformer", 3)], "remat": "never", "contenders": ["gpipe", "torch gpipe"]}
    (norms,) = run_workers("bench_jobs:gradients", 2, config, throughput_table.PRELOAD)
    assert norms["gpipe"] and norms["torch gpipe"] is None


def test_every_contender_s_step_ends_in_an_update() -> None:
    weight = nn.Parameter(torch.ones(1))
    layer = nn.Module()
    layer.register_parameter("weight", weight)
    work = Workload(lambda i, divisible: layer, {}, 1, "never", 0, 1, (weight, weight), built=[layer])
    contenders.with_update(lambda: (1e3 * weight).sum().backward(), work)()
    assert float(weight.detach()) < 1.0 and weight.grad is not None and not weight.grad.any()
    contenders.with_update(lambda: None, replace(work, built=[]))()


def test_a_peer_s_recompute_draws_the_same_noise_again() -> None:
    def gradient(remat: bool) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.ones(100, requires_grad=True)
        outputs = RealStage([nn.Dropout(0.5), nn.Tanh()], remat)(x)
        assert isinstance(outputs, torch.Tensor)
        torch.rand(10)  # as another micro-batch would
        outputs.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(remat=True), gradient(remat=False))


def test_a_peer_s_stage_hands_on_contiguous_tensors_and_gradients() -> None:
    """torch's pipelining sends no others; a layer that transposes has neither."""
    x = torch.ones(4, 3, requires_grad=True)
    outputs = RealStage([nn.Identity(), Transposed()], remat=False)(x)
    assert isinstance(outputs, tuple) and all(y.is_contiguous() for y in outputs)
    assert torch.autograd.grad(outputs[1].mean(), x)[0].is_contiguous()


class Transposed(nn.Module):
    """Returns its input and the transposed input."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.T


@pytest.mark.slow(2)
def test_what_does_not_fit_costs_its_own_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices with room for two examples: M=2 fits, M=1 does not, of any contender."""
    monkeypatch.setattr(throughput_table, "WORKER", "bench_jobs:hungry")
    figures = bench(tmp_path, "M=1,2", "quick=true", "schedules=gpipe")
    rows = {row["M"]: row for row in figures["rows"]}
    everyone = ["gpipe", "torch gpipe", "plain"]
    assert rows[1]["too_large"] == everyone and set(rows[1]["seconds"].values()) == {None}
    assert rows[1]["ours"] is None and rows[1]["reference"] == [2, 2]
    assert rows[2]["too_large"] == [] and all(rows[2]["seconds"][name] > 0 for name in everyone)
    assert "torch.distributed.pipelining" in figures["text"]
    assert rows[2]["ours"] == 1.0, "the reference is the first that fits"
    assert "transformer K=2 M=1 (gpipe, torch gpipe, plain)" in figures["text"]
    assert "transformer: K=2, M=2" in figures["text"] or "our own run at K=2, M=2" in figures["text"]
    assert "The paper's figures are in units of its own, K=2, M=1" in figures["text"]


@pytest.mark.slow(2)
def test_a_model_of_which_nothing_fits_has_dashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput_table, "WORKER", "bench_jobs:starving")
    figures = bench(tmp_path, "M=2", "peers=false", "schedules=gpipe")
    (row,) = figures["rows"]
    assert row["ours"] is None and row["too_large"] == ["gpipe"]
    assert "transformer: none" in figures["text"]
    assert (tmp_path / "table2.png").exists()


@pytest.mark.slow(2)
def test_another_failure_ends_the_command_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(throughput_table, "WORKER", "bench_jobs:broken")
    assert main([*REAL, "M=2", "peers=false", "schedules=gpipe", f"output={tmp_path}"]) == 1
    told = capsys.readouterr().err
    assert "ValueError: broken in another way" in told and "Traceback" in told


@pytest.mark.slow
def test_too_little_memory_is_known_from_other_failures() -> None:
    """It really asks for more than any machine has, on the CPU; the other worker waits for it."""
    with pytest.raises(WorkerOutOfMemory, match="wrapped") as failure:
        run_workers("bench_jobs:greedy", 2, {})
    assert throughput_table.last_line(failure.value) == "RuntimeError: wrapped, as torch's pipelining does"
    with pytest.raises(WorkerFailed) as failure:
        run_workers("bench_jobs:crash", 1, {})
    assert not isinstance(failure.value, WorkerOutOfMemory)
