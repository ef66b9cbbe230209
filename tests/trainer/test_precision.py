"""Half precision gives the same bits for every K: bf16, and boundaries in half precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_run import train_inline
from own_plan import planned
from safetensors.torch import load_file

from gpipe_cli.checkpoint.files import read_manifest, step_directory
from gpipe_cli.commands.plan import make_request
from gpipe_cli.factory.build import allow_tf32

STEPS = 2
TINY = (
    "debug=tiny",
    f"trainer.steps={STEPS}",
    "trainer.evaluate_first=false",
    "trainer.evaluate_every=null",
    "checkpoint.every=null",
    "model.dropout=0.1",
    "task.generation=null",
)
BOUNDARIES = ("precision=bf16", "precision.boundaries=bfloat16")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trained(run_dir: Path, *words: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses of a run and all tensors of its last checkpoint."""
    train_inline(run_dir, *TINY, *words)
    manifest = read_manifest(step_directory(run_dir, STEPS))
    tensors = {
        f"{name}/{key}": value
        for name in manifest.layers
        for key, value in load_file(manifest.layer_path(name)).items()
    }
    return [row["loss"] for row in rows(run_dir)], tensors


def changed(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(tmp_path_factory.mktemp("whole") / "run", *BOUNDARIES, "pipeline.K=1")


@pytest.mark.parametrize(
    "words",
    [("pipeline.K=4",), pytest.param(("pipeline.K=2", "pipeline.remat=always"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_boundaries_in_bf16_give_the_same_bits_for_every_k(
    words: tuple[str, ...], whole: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    losses, tensors = trained(tmp_path / "run", *BOUNDARIES, *words)
    assert losses == whole[0]
    assert changed(tensors, whole[1]) == []


def test_boundaries_in_bf16_round_what_passes(
    whole: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    losses, _ = trained(tmp_path / "run", "precision=bf16", "pipeline.K=4")
    assert losses != whole[0]
    assert losses == pytest.approx(whole[0], rel=0.02)


def test_boundaries_in_bf16_halve_the_messages() -> None:
    words = ("model=transformer_lm_small", "model.L=4", "pipeline.K=4", "data.batch_size=16", "precision=bf16")
    wide, narrow = planned(*words), planned(*words, "precision.boundaries=bfloat16")
    assert 0.5 <= narrow.sent_bytes / wide.sent_bytes < 0.51  # targets stay as they are
    assert narrow.cells[1].inputs < 0.51 * wide.cells[1].inputs


def test_tf32_is_allowed_on_a_gpu_only_where_the_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    for words, device in (((), "cpu"), ((), "cuda"), (("precision.tf32=true",), "cuda")):
        allow_tf32(make_request(words).settings.precision, torch.device(device))
        chosen.append(f"cuDNN {torch.backends.cudnn.allow_tf32}")
    assert chosen == ["cuDNN True", "highest", "cuDNN False", "high", "cuDNN True"]
