"""Tests that the modules of docs/your-own-model.md run as printed, at tiny sizes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from inline_run import train_inline

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(gpipe-train model=module .*?)```", PAGE, re.DOTALL)
SHORT = ["trainer.steps=1", "trainer.evaluate_every=null", "trainer.evaluate_first=false", "pipeline.M=2"]
IMAGES = ["data=digits", "data.batch_size=8", "data.image_size=32"]
CORPUS = ["data.languages=[de]", "data.largest=100", "data.vocabulary=300", "data.evaluation_per_language=2"]
TEXTS = [*CORPUS, "data.batch_size=4", "data.sequence_length=16"]
CONFIG = "model.module.config"
TINY = {
    "resnet50": [*IMAGES, "model.module.num_classes=10"],
    "vit_b_16": IMAGES,
    "GPT2Config": [*TEXTS, f"{CONFIG}.n_embd=32", f"{CONFIG}.n_layer=2", f"{CONFIG}.n_head=4"],
    "LlamaConfig": [*TEXTS, f"{CONFIG}.hidden_size=32", f"{CONFIG}.num_hidden_layers=2"],
    "T5Config": [*CORPUS, "data.batch_tokens=600", f"{CONFIG}.d_model=32", f"{CONFIG}.num_layers=2"],
}


def test_the_page_has_five_examples() -> None:
    assert len(BLOCKS) == len(TINY)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow(1 if name == "GPT2Config" else 2)) for name in TINY]
)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    if name.endswith("Config"):
        pytest.importorskip("transformers")
    (block,) = (block for block in BLOCKS if name in block)
    words = [word for word in shlex.split(block.replace("\\\n", " "))[1:] if not word.startswith("data.")]
    keys = {word.partition("=")[0] for word in (*TINY[name], *SHORT)}
    kept = [word for word in words if word.partition("=")[0] not in keys]
    summary, _ = train_inline(tmp_path, *kept, *TINY[name], *SHORT)
    assert len(summary["cells"]) == 4
