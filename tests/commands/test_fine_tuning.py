"""Tests docs/your-own-model.md, "Fine-tuning", as printed, in fewer steps, with tiny models saved here."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, succeeded
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.functional import to_pil_image

from gpipe_cli.checkpoint.files import read_manifest, step_directory
from gpipe_cli.factory.build import build_source

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-model.md").read_text(encoding="utf-8")
PART = PAGE[PAGE.index("## Fine-tuning") : PAGE.index("## A list")].replace("trainer.steps=100", "trainer.steps=10")
TEXTS, IMAGES = re.findall(r"```sh\n(.*?)```", PART, re.DOTALL)
transformers = pytest.importorskip("transformers")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs lines of the page in an empty folder, and stays in it."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return lambda lines: print(succeeded(run("bash", "-ec", lines, PATH=path)))


def save_gpt2() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<|endoftext|>", *map(str, range(50)), "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained("gpt2")
    sizes = {"n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4}
    config = transformers.GPT2Config(vocab_size=len(words), bos_token_id=0, eos_token_id=0, **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained("gpt2")
    Path("texts").mkdir()
    lines = [" ".join(str((first + step) % 50) for step in range(20 + first // 50)) for first in range(700)]
    Path("texts/counting.txt").write_text("\n\n".join(lines))


def save_vit() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=224, patch_size=56, num_labels=10, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained("vit")
    transformers.ViTImageProcessor().save_pretrained("vit")
    for folder in (Path("pets", split, str(kind)) for split in ("train", "val") for kind in range(3)):
        folder.mkdir(parents=True)
        for number in range(16):
            image = torch.randint(0, 60, (3, 32, 32), dtype=torch.uint8)
            image[int(folder.name)] += 150
            to_pil_image(image).save(folder / f"{number}.png")


def plain_loss(model: Any, run: Path, prepared: Callable[[Tensor], Tensor]) -> float:
    """Returns the mean loss of a model of the library on the evaluation set of a run."""
    config: Any = read_manifest(step_directory(run, 10)).state.configuration
    source = build_source(config["data"], config["seed"])
    source.prepare(lambda *_: None)  # type: ignore[attr-defined]  # optional in general
    losses = []
    with torch.no_grad():
        for (inputs,), (targets,) in (pair for batch in source.evaluation(1) for pair in batch.micro_batches):
            logits = model(prepared(inputs)).logits
            counts = targets.flatten() != -100
            losses.append(F.cross_entropy(logits.flatten(0, -2)[counts], targets.flatten()[counts], reduction="none"))
    return float(torch.cat(losses).mean())


def told_loss(run: Path) -> float:
    """Returns the loss of a run's last evaluation."""
    return float(json.loads((run / "summary.json").read_text())["evaluation"]["nll"])


@pytest.mark.slow
def test_a_language_model_of_the_library_is_trained_and_loaded_by_it(shell: Callable[[str], None]) -> None:
    save_gpt2()
    shell(TEXTS)
    before, tuned = map(transformers.AutoModelForCausalLM.from_pretrained, ("gpt2", "tuned"))
    told = told_loss(Path("runs/tuned"))
    assert plain_loss(tuned, Path("runs/tuned"), lambda ids: ids) == pytest.approx(told, rel=1e-5)
    assert plain_loss(before, Path("runs/tuned"), lambda ids: ids) > told
    assert transformers.AutoTokenizer.from_pretrained("tuned")("7 8")["input_ids"] == [8, 9]


@pytest.mark.slow
def test_a_classifier_of_the_library_gets_a_new_head(shell: Callable[[str], None]) -> None:
    save_vit()
    shell(IMAGES)
    tuned = transformers.AutoModelForImageClassification.from_pretrained("tuned-vit", num_labels=3)
    loss = plain_loss(tuned, Path("runs/tuned-vit"), lambda images: (images / 255 - 0.5) / 0.5)
    assert loss == pytest.approx(told_loss(Path("runs/tuned-vit")), rel=1e-4)
