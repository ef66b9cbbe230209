"""Tests the experiments with images, each on tiny images in the layout of its real data set."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_images
from composed import composed
from inline_run import train_inline

from gpipe_cli.checkpoint.files import resolve
from gpipe_cli.config import Settings

CONF = Path(__file__).parents[2] / "conf" / "experiment"
IMAGENET = [f"imagenet/{path.stem}" for path in sorted((CONF / "imagenet").glob("*.yaml"))]
PRETRAINING = "imagenet/amoebanet_b_18_512"  # what the transfer experiments begin with
TRANSFER = [path.stem for path in sorted((CONF / "transfer").glob("*.yaml"))]
TINY = ("debug=tiny", "model.L=3", "trainer.steps=1", "data.workers=0", "data.classes=3", "data.batch_size=8")


def birdsnap(root: Path) -> dict[str, Any]:
    return tiny_images.image_folder(root, ("train", "test"))


MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{make.__name__: make for make in tiny_images.DATASETS},
    "birdsnap": birdsnap,
}
PAPER = {  # table 5: training images, classes
    "cifar10": (50_000, 10),
    "cifar100": (50_000, 100),
    "stanford_cars": (8_144, 196),
    "oxford_pets": (3_680, 37),
    "food101": (75_750, 101),
    "fgvc_aircraft": (6_667, 100),
    "birdsnap": (47_386, 500),
}


def settings(experiment: str, *words: str) -> dict[str, Any]:
    """Returns the settings at full size, as a user would start the experiment."""
    config = composed(f"experiment={experiment}", "data.root=/data", *words)
    Settings.from_config(config)
    return config


# --- what they set


@pytest.mark.parametrize("name", TRANSFER)
def test_a_transfer_has_the_paper_s_classes_and_whole_epochs(name: str) -> None:
    images, classes = PAPER[name]
    config = settings(f"transfer/{name}")
    assert config["model"]["classes"] == classes and config["data"]["dataset"] in (name, "image_folder")
    assert config["checkpoint"]["init_from"] == "runs/" + PRETRAINING.replace("/", "_")
    assert settings(f"transfer/{name}", "checkpoint.init_from=null")  # as planned in its file, and in docs/images.md
    assert config["trainer"]["steps"] == (50 if images > 10_000 else 200) * (images // 256)


def test_imagenet_b_is_the_paper_s_model_and_recipe() -> None:
    config = settings(PRETRAINING)
    model, pipeline, trainer = config["model"], config["pipeline"], config["trainer"]
    assert (model["genotype"], model["L"], model["D"], model["image_size"]) == ("B", 18, 512, 480)
    assert (pipeline["K"], pipeline["M"], config["data"]["batch_size"]) == (4, 16, 256)
    assert trainer["steps"] == 100 * (1_281_167 // 256)
    assert config["precision"]["autocast"] == "bfloat16"


# --- what they do


def train_tiny(folder: Path, experiment: str, *words: str) -> dict[str, Any]:
    root = folder / "data"
    MAKERS["imagenet" if experiment in IMAGENET else experiment.partition("/")[2]](root)
    summary, _ = train_inline(folder / "run", *TINY, f"experiment={experiment}", f"data.root={root}", *words)
    return summary


def check(summary: dict[str, Any]) -> None:
    assert summary["steps"] == 1 and math.isfinite(summary["loss"]) and summary["skipped_updates"] == 0
    assert 0 <= summary["evaluation"]["accuracy"] <= 1


@pytest.mark.parametrize("experiment", [name for name in IMAGENET if name != PRETRAINING])
def test_a_tiny_step_on_imagenet_s_layout(experiment: str, tmp_path: Path) -> None:
    check(train_tiny(tmp_path, experiment))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains on ImageNet's layout; returns the checkpoint."""
    folder = tmp_path_factory.mktemp("imagenet")
    check(train_tiny(folder, PRETRAINING))
    checkpoint = resolve(str(folder / "run"), folder / "new", None).checkpoint
    assert checkpoint is not None
    return checkpoint.path


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "food101" else pytest.mark.slow(2)) for name in TRANSFER],
)
def test_a_tiny_transfer_on_each_data_set_s_layout(
    name: str, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_images.accept_any_cifar(monkeypatch)
    words = ["data.batch_size=3", "pipeline.M=1"] if name == "cifar100" else []  # three images are all there are
    check(train_tiny(tmp_path, f"transfer/{name}", f"checkpoint.init_from={pretrained}", *words))
