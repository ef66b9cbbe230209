"""Tests that the translation experiments are the paper's models, and that each runs on tiny text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import composed
from inline_run import train_inline
from parallel_folder import opus

from gpipe_cli.config import Settings
from gpipe_cli.factory.build import build_model

PAPER = {  # L, H, A, K (section 5), parameters, tokens of a mini-batch
    "nmt/t_6_8192_16": (6, 8192, 16, 1, 408_177_920, 4_000_000),
    "nmt/t_24_8192_16": (24, 8192, 16, 4, 1_239_387_392, 4_000_000),
    "nmt/t_12_16384_32": (12, 16384, 32, 2, 1_239_203_072, 4_000_000),
    "nmt/t_32_16384_32": (32, 16384, 32, 8, 3_086_028_032, 4_000_000),
    "nmt/t_64_16384_32": (64, 16384, 32, 16, 6_040_947_968, 4_000_000),
    "nmt/bilingual": (6, 8192, 16, 1, 375_409_920, 260_000),
    "nmt/large_batch": (6, 8192, 16, 1, 375_409_920, 4_000_000),
}
SMALL = ("narrow", "bilingual", "very_deep")  # wide and deep are narrow with other sizes


def settings(*words: str) -> dict[str, Any]:
    """Returns the settings at full size, as a user would start the experiment."""
    config = composed(*words)
    Settings.from_config(config)
    return config


def parameters(config: dict[str, Any]) -> int:
    with torch.device("meta"):
        return sum(value.numel() for layer in build_model(config["model"]) for value in layer.build().parameters())


@pytest.mark.parametrize("name", PAPER)
def test_each_is_the_paper_s_model(name: str) -> None:
    config = settings(f"experiment={name}", "data.root=/data")
    model, (L, H, A, K, count, tokens) = config["model"], PAPER[name]
    assert (model["L"], model["H"], model["A"], model["d_model"], config["pipeline"]["K"]) == (L, H, A, 1024, K)
    assert config["data"]["batch_tokens"] == tokens
    assert parameters(config) == count


@pytest.mark.parametrize("name", PAPER)
def test_each_has_the_paper_s_recipe(name: str) -> None:
    config = settings(f"experiment={name}", "data.root=/data")
    assert config["optimizer"]["_target_"] == "gpipe_cli.optim.adafactor.Adafactor"
    assert (config["optimizer"]["lr"], config["optimizer"]["beta1"], config["optimizer"]["clip"]) == (1.0, 0.9, 1.0)
    assert (config["lr_schedule"]["factor"], config["lr_schedule"]["warmup_steps"]) == (3.0, 40_000)
    assert (config["task"]["label_smoothing"], config["model"]["dropout"], config["data"]["temperature"]) == (
        0.1,
        0.1,
        5,
    )
    assert (config["task"]["generation"]["beam"], config["task"]["generation"]["length_exponent"]) == (8, 0.5)
    assert config["task"]["generation"]["per_language_at_end"] is None  # whole test sets, as figure 3
    assert config["data"]["evaluation_per_language"] is None


def test_the_small_family_has_the_paper_s_proportions() -> None:
    narrow, wide, deep = (settings(f"experiment=nmt_small/{name}") for name in ("narrow", "wide", "deep"))
    assert wide["model"]["H"] == 2 * deep["model"]["H"] and wide["model"]["A"] == 2 * deep["model"]["A"]
    assert deep["model"]["L"] == 2 * wide["model"]["L"] == 4 * narrow["model"]["L"]
    assert parameters(wide) == pytest.approx(parameters(deep), rel=0.005)
    for config in (wide, deep):
        assert {**config, "model": 0, "name": 0} == {**narrow, "model": 0, "name": 0}


@pytest.mark.parametrize("name", SMALL)
def test_a_tiny_step_of_the_small_family(name: str, tmp_path: Path) -> None:
    words = ["debug=tiny", "trainer.steps=1", "trainer.patience=null"]
    check(train_inline(tmp_path, f"experiment=nmt_small/{name}", *words)[0])


@pytest.mark.parametrize("name", ["nmt/t_64_16384_32", "nmt/bilingual"])
def test_a_tiny_step_on_opus_s_layout(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_CACHE", str(tmp_path / "cache"))
    root = opus(tmp_path / "opus")
    words = ["debug=tiny", "trainer.steps=1", "trainer.patience=null", f"data.root={root}", "pipeline.workers=1"]
    words += [f"data.{side}vocabulary=6000" for side in ("", "source_", "target_")] if name == "nmt/bilingual" else []
    summary, events = train_inline(tmp_path / "run", f"experiment={name}", *words)
    check(summary)
    smaller = [event["text"] for event in events if "the text supports" in event.get("text", "")]
    assert len(smaller) == (name == "nmt/bilingual"), "300 pairs support fewer pieces, which is said once"
    languages = {found for found in summary["evaluation"] if found.startswith("bleu/")}
    assert languages == ({"bleu/de"} if name == "nmt/bilingual" else {"bleu/de", "bleu/fi", "bleu/sw"})


def check(summary: dict[str, Any]) -> None:
    assert summary["steps"] == 1 and math.isfinite(summary["loss"]) and summary["skipped_updates"] == 0
    assert "bleu" in summary["evaluation"] or summary["evaluation"]["nll"] > 0
