"""Tests gpipe-bench: the contents of the paper's tables, at sizes too small to measure speed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import command, succeeded
from torch import nn

from gpipe_cli.benchmarks.tables.bench import parse
from gpipe_cli.benchmarks.tables.emulated import WIDTH, SleepingLayer
from gpipe_cli.benchmarks.tables.throughput import ModelCosts, Setting
from gpipe_cli.commands.bench import main
from gpipe_cli.pipeline.halves import backward_of_inputs

TINY = ("K=2", "repetitions=1", "seconds=0.02", "models=transformer")


def bench(folder: Path, *words: str) -> dict[str, Any]:
    """Runs the command as a person does; returns the figures that it wrote."""
    said = succeeded(command("bench", *words, f"output={folder}"))
    found: dict[str, Any] = json.loads(next(folder.glob("*.json")).read_text(encoding="utf-8"))
    return {**found, "stdout": said}


def setting(K: int, M: int, *words: str, linked: bool = False) -> Setting:
    """Returns a setting of a model of 8 equal layers, 1 FLOP and 1,000 bytes each."""
    costs = ModelCosts("transformer", (3,), (1.0,) * 8, (1000,) * 8)
    return Setting(costs, K, M, parse(["table=3", "seconds=3", *words]), linked)


@pytest.mark.slow(2)
def test_table_2_as_real_processes(tmp_path: Path) -> None:
    figures = bench(tmp_path, "table=2", "M=1,2", *TINY)
    rows = {(row["K"], row["M"]): row for row in figures["rows"]}
    assert set(rows) == {(2, 1), (2, 2)}
    assert rows[2, 1]["ours"] == 1.0
    assert rows[2, 2]["K·M/(M+K−1)"] == pytest.approx(4 / 3)
    assert rows[2, 1]["seconds"]["torch 1f1b"] is None, "torch refuses M < K"
    assert {"gpipe", "1f1b", "torch gpipe", "torch 1f1b", "torch interleaved"} <= set(rows[2, 2]["seconds"])
    assert all(seconds >= rows[2, 2]["serial_seconds"] / 2 for seconds in rows[2, 2]["seconds"].values())
    assert {path.suffix for path in tmp_path.iterdir()} == {".html", ".json", ".svg"}
    assert "K·M/(M+K−1)" in figures["stdout"]


def test_the_shortest_step_of_even_cells_is_the_paper_s_formula() -> None:
    assert setting(4, 8, "remat=never").limit("gpipe") == pytest.approx(3.0 / 4 * (8 + 3) / 8)
    assert setting(4, 2, "remat=never").limit("1f1b") == pytest.approx(3.0 / 4 * (2 + 3) / 2)


def test_a_slow_link_stretches_bytes_as_flops_and_makes_the_shortest_step_longer() -> None:
    words = ("device_flops=24", "bandwidth=500", "latency=0.5", "remat=never")
    free, slow = setting(2, 4, *words), setting(2, 4, *words, linked=True)
    assert slow.link is not None  # 32 examples of 24 FLOPs at 24 FLOP/s: 32 s, shown in 3
    assert slow.link["carry"] == pytest.approx([0.0, 8000 / 500 * 3 / 32])
    assert slow.link["latency"] == pytest.approx(0.5 * 3 / 32)
    assert slow.limit("gpipe") > free.limit("gpipe") + 2 * slow.link["carry"][1] - 1e-9


def test_the_backward_of_an_emulated_layer_can_be_divided() -> None:
    x = torch.zeros(2, WIDTH, requires_grad=True)
    y = nn.Sequential(*(SleepingLayer(0.0, divisible=True) for _ in range(3)))(x)
    assert len(backward_of_inputs([y], [torch.ones_like(y)], [x])) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["table=2", "schedules=pipedream"], "schedules=[pipedream]: should be 'gpipe'"),
        (["table=3", "schedules=interleaved_1f1b"], "leave it out"),
        (["table=4", "K=2,4"], "give one K"),
    ],
)
def test_what_a_table_cannot_do_is_refused_before_anything_runs(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, f"output={tmp_path / 'bench'}"]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "bench").exists()


@pytest.mark.slow(2)
def test_table_4_has_the_paper_s_shares_of_every_column(tmp_path: Path) -> None:
    figures = bench(tmp_path, "table=4", "M=2", "quick=true", "train=[debug=tiny]", *TINY)
    for column in ("paper", "gpipe-train here"):
        assert sum(row[column] for row in figures["rows"]) == pytest.approx(1, abs=0.001)
