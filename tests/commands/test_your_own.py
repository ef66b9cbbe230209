"""Tests docs/your-own-model.md as printed, and that a user's mistakes are told in the user's terms."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from inline_run import train_inline
from processes import run, succeeded
from refusals import refusal_of
from run_files import rows

from gpipe_cli.errors import PlainError
from gpipe_cli.factory.build import build_source
from gpipe_cli.pipeline.cell import LayerFailed

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "your-own-model.md").read_text(encoding="utf-8")


def blocks(page: str, language: str, begin: str = "") -> list[str]:
    """Returns the page's blocks of code in a language that begin so."""
    return re.findall(rf"```{language}\n({begin}.*?)```", page, re.DOTALL)


def words_of(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))[1:]


MODULE = blocks(PAGE, "python", "from functools")[0]
WORDS = words_of(blocks(PAGE, "sh", "gpipe-train model._target_")[0])


Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs the page's command in this process with a changed module and further overrides; returns the summary."""

    def start(module: str, *words: str) -> dict[str, Any]:
        (tmp_path / "spirals.py").write_text(module, encoding="utf-8")
        monkeypatch.delitem(sys.modules, "spirals", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        return train_inline(tmp_path / "run", *WORDS, *words)[0]

    return start


def train_by_command(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "spirals.py").write_text(module, encoding="utf-8")
    return run(Path(sys.executable).with_name("gpipe-train"), *WORDS, "hydra.run.dir=run", *words, cwd=folder)


def changed(old: str, new: str) -> str:
    assert old in MODULE
    return MODULE.replace(old, new)


@pytest.mark.slow
def test_the_page_s_example_learns(tmp_path: Path) -> None:
    succeeded(train_by_command(tmp_path, MODULE, "logging.tensorboard=false"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["evaluation"]["accuracy"] > 0.9
    assert [cell["cell"] for cell in summary["cells"]] == [0, 1, 2, 3]
    assert "Did it work" in (tmp_path / "run" / "report.html").read_text()


def test_an_exception_in_a_layer_ends_the_run_with_its_place(train: Train) -> None:
    count = "self.calls = getattr(self, 'calls', 0) + 1\n        assert self.calls < 14, 'planted'\n        "
    broken = changed("return x + F.relu", f"{count}return x + F.relu")
    with pytest.raises(LayerFailed, match=r"cell \d, layer 'hidden_\d', micro-batch \d") as failed:
        train(broken, "trainer.evaluate_first=false")
    assert isinstance(failed.value.__cause__, AssertionError) and "planted" in str(failed.value.__cause__)


def test_a_loss_that_is_not_finite_skips_the_update_and_then_stops_by_name(train: Train, tmp_path: Path) -> None:
    broken = changed(
        '        return F.cross_entropy(outputs[0], targets[0], reduction="sum"), torch',
        "        bad = float('nan') if (targets[0][0] == 0) else 1.0\n"
        '        return bad * F.cross_entropy(outputs[0], targets[0], reduction="sum"), torch',
    )
    said = r"step \d+: the loss is nan.*the task's loss \(cell \d\), micro-batch \d; 3 updates in a row"
    with pytest.raises(PlainError, match=said):
        train(broken, "trainer.nonfinite_limit=3", "trainer.evaluate_first=false")
    assert rows(tmp_path / "run" / "metrics.jsonl")[-1]["skipped_updates"] >= 3


@pytest.mark.parametrize(
    ("old", "new", "words", "message"),
    [
        ("return x + F.relu", "x += 1\n        return x + F.relu", ["pipeline.K=8"], "use inplace=False there"),
        ("def layers(width: int = 64, depth", "def layers(width: int = 64, deep", [], "model._target_=spirals.la"),
        ('LayerBuilder("last"', 'LayerBuilder("first"', [], "two layers named 'first'"),
        ("    def loss(self", "    def lose(self", [], "abstract"),
        ("class Spirals(Source)", "class Spirals", [], "is no subclass of gpipe_cli.data.source.Source"),
        (', reduction="sum"), torch.zeros(0, dtype=torch.float64)', ', reduction="sum")', [], "loss() must return two"),
        ("return torch.stack([nll.double(), correct.double()])", "return nll.double()", [], "evaluate() must return"),
        ("Batch(pieces[replica", "Batch(pieces + pieces[replica", [], "gave 8 micro-batches"),
    ],
)
def test_mistakes_are_named(train: Train, old: str, new: str, words: list[str], message: str) -> None:
    assert message in refusal_of(train, changed(old, new), *words)


@pytest.mark.slow
def test_all_replicas_stop_when_the_data_of_one_ends(tmp_path: Path) -> None:
    ends = changed("while True:", "while replica == 0 or number < 3:")
    words = ["pipeline.K=1", "pipeline.replicas=2", "pipeline.workers=1", "logging.tensorboard=false"]
    succeeded(train_by_command(tmp_path, ends, *words))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["stopped_by"]) == (3, "end of data")


# -- modules of libraries -----------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("name", [pytest.param(of, marks=pytest.mark.slow(1 + (of != "GPT2Config"))) for of in TINY])
def test_an_example_of_a_module_trains(name: str, tmp_path: Path) -> None:
    if name.endswith("Config"):
        pytest.importorskip("transformers")
    examples = blocks(PAGE[: PAGE.index("## Fine-tuning")], "sh", "gpipe-train model=module ")
    assert len(examples) == len(TINY)
    (command,) = (example for example in examples if name in example)
    words = [word for word in words_of(command) if not word.startswith("data.")]
    keys = {word.partition("=")[0] for word in (*TINY[name], *SHORT)}
    kept = [word for word in words if word.partition("=")[0] not in keys]
    summary, _ = train_inline(tmp_path, *kept, *TINY[name], *SHORT)
    assert len(summary["cells"]) == 4


# -- data ----------------------------------------------------------------------------------------------------------


def test_the_yaml_of_data_sets_makes_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_data.py").write_text("def MyDataset(split):\n    return [(0.5, 1)] * 64\n")
    monkeypatch.syspath_prepend(tmp_path)
    section = yaml.safe_load(blocks(PAGE, "yaml")[0]) | {"seed": 1, "workers": 0}
    ((inputs,), (targets,)) = next(build_source(section, 0).train(None, 4, 0, 1)).micro_batches[0]
    assert torch.equal(targets, torch.ones(16, dtype=torch.int64)) and len(inputs) == 16
