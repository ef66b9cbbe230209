"""Tests that half precision gives the same bits for every K: boundaries in bf16, float16 with a scaled loss."""

import math
from pathlib import Path

import pytest
import torch
from checkpoint_tools import changed, saved
from inline_run import train_inline
from own_plan import planned
from run_files import losses, rows

from gpipe_cli.checkpoint.files import step_directory
from gpipe_cli.commands.plan import make_request
from gpipe_cli.factory.build import choose_kernels
from gpipe_cli.metrics.records import Progress
from gpipe_cli.pipeline.step import StepPlan, StepResult
from gpipe_cli.trainer.nonfinite import adjust_scale

TINY = (
    *("debug=tiny", "trainer.evaluate_first=false", "trainer.evaluate_every=null", "checkpoint.every=null"),
    *("model.dropout=0.1", "task.generation=null"),
)
BOUNDARIES = ("precision=bf16", "precision.boundaries=bfloat16")


def trained(run_dir: Path, *words: str, steps: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses of a run and all tensors of its last checkpoint."""
    train_inline(run_dir, *TINY, f"trainer.steps={steps}", *words)
    return losses(run_dir), saved(run_dir, steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(tmp_path_factory.mktemp("whole") / "run", *BOUNDARIES, "pipeline.K=1")


def test_bf16_boundaries_have_one_result(whole: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path) -> None:
    found, tensors = trained(tmp_path / "run", *BOUNDARIES, "pipeline.K=4")
    assert found == whole[0]
    assert changed(tensors, whole[1]) == []


def test_bf16_trains_close_to_fp32_and_boundaries_in_bf16_round_what_passes(
    whole: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    found, _ = trained(tmp_path / "bf16", "precision=bf16", "pipeline.K=4")
    assert found != whole[0] and found == pytest.approx(whole[0], rel=0.02)
    exact, _ = trained(tmp_path / "fp32", "pipeline.K=1")
    assert found != exact and found == pytest.approx(exact, rel=0.02)


def test_boundaries_in_bf16_halve_the_messages() -> None:
    words = ("model=transformer_lm_small", "model.L=4", "pipeline.K=4", "data.batch_size=16", "precision=bf16")
    wide, narrow = planned(*words), planned(*words, "precision.boundaries=bfloat16")
    assert 0.5 <= narrow.sent_bytes / wide.sent_bytes < 0.51  # targets stay as they are
    assert narrow.cells[1].inputs < 0.51 * wide.cells[1].inputs


# -- float16 -----------------------------------------------------------------------------------------------------------

FLOAT16 = ("precision=fp16", f"precision.loss_scale={2**22}")  # gradients overflow in the first steps


def scales(run_dir: Path) -> list[tuple[float, int]]:
    """Returns the loss scale and the number of skipped updates after every step."""
    return [(row["loss_scale"], row["skipped_updates"]) for row in rows(run_dir / "metrics.jsonl")]


def test_loss_scaling_gives_the_same_bits_for_every_k_and_over_a_resume(tmp_path: Path) -> None:
    found, tensors = trained(tmp_path / "whole", *FLOAT16, "pipeline.K=1", steps=4)
    assert scales(tmp_path / "whole") == [(2**21, 1), (2**20, 2), (2**20, 2), (2**20, 2)]
    trained(tmp_path / "cut", *FLOAT16, "pipeline.K=4", steps=1)
    resume = f"checkpoint.resume={step_directory(tmp_path / 'cut', 1)}"
    again = trained(tmp_path / "cut", *FLOAT16, "pipeline.K=2", resume, steps=4)
    assert again[0] == found
    assert changed(again[1], tensors) == []
    assert scales(tmp_path / "cut") == scales(tmp_path / "whole")


def test_an_overflow_is_told_and_is_no_error(tmp_path: Path) -> None:
    words = (*FLOAT16, "pipeline.K=2", "trainer.nonfinite_limit=1", "trainer.steps=1")
    _, events = train_inline(tmp_path / "run", *TINY, *words)
    assert [event for event in events if event["kind"] == "warning"] == []
    told = "step 1: gradients overflow float16 with their loss scale; update skipped, the scale is 2,097,152 now"
    assert told in [event["text"] for event in events if event["kind"] == "message"]
    assert "not_finite" not in rows(tmp_path / "run" / "metrics.jsonl")[0]


def result_of(loss: float, norm: float, scale: float | None) -> StepResult:
    return StepResult(StepPlan((), 1.0, loss_scale=scale or 1.0), loss, [], norm, [], 0.0, [], {})


def test_the_scale_doubles_after_many_steps_without_overflow() -> None:
    progress, good, bad = Progress(loss_scale=8.0), result_of(1.0, 1.0, 8.0), result_of(1.0, math.inf, 8.0)
    for result in [*[good] * 1999, bad, *[good] * 1999]:
        adjust_scale(progress, result)
    assert progress.loss_scale == 4.0
    adjust_scale(progress, good)
    assert progress.loss_scale == 8.0


def test_a_gpu_uses_tf32_and_kernels_whose_bits_vary_only_where_a_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen.append)  # with warn_only attention would vary
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    other = ("precision.tf32=true", "precision.deterministic=false")
    for words, device in (((), "cpu"), ((), "cuda"), (other, "cuda")):
        choose_kernels(make_request(words).settings.precision, torch.device(device))
        chosen.append(f"cuDNN {torch.backends.cudnn.allow_tf32}")
    assert chosen == ["cuDNN True", "highest", True, "cuDNN False", "high", False, "cuDNN True"]
