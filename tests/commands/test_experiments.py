"""Tests that the experiments are the paper's, and runs of each on tiny data in the layout of its real data set."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import torch
from composed import composed
from inline_run import train_inline
from parallel_folder import opus

from gpipe_cli.checkpoint.files import resolve
from gpipe_cli.config import Settings
from gpipe_cli.factory.build import build_model

CONF = Path(__file__).parents[2] / "conf" / "experiment"
IMAGENET = [f"imagenet/{path.stem}" for path in sorted((CONF / "imagenet").glob("*.yaml"))]
PRETRAINING = "imagenet/amoebanet_b_18_512"  # what the transfer experiments begin with
TRANSFER = [path.stem for path in sorted((CONF / "transfer").glob("*.yaml"))]
TINY = ("debug=tiny", "model.L=3", "trainer.steps=1", "data.workers=0", "data.classes=3", "data.batch_size=8")
MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{make.__name__: make for make in tiny_images.DATASETS},
    "birdsnap": partial(tiny_images.image_folder, folders=("train", "test")),
}
IMAGES = {  # table 5: training images, classes
    "cifar10": (50_000, 10),
    "cifar100": (50_000, 100),
    "stanford_cars": (8_144, 196),
    "oxford_pets": (3_680, 37),
    "food101": (75_750, 101),
    "fgvc_aircraft": (6_667, 100),
    "birdsnap": (47_386, 500),
}
TRANSLATION = {  # L, H, A, K (section 5), parameters, tokens of a mini-batch
    "nmt/t_6_8192_16": (6, 8192, 16, 1, 408_177_920, 4_000_000),
    "nmt/t_24_8192_16": (24, 8192, 16, 4, 1_239_387_392, 4_000_000),
    "nmt/t_12_16384_32": (12, 16384, 32, 2, 1_239_203_072, 4_000_000),
    "nmt/t_32_16384_32": (32, 16384, 32, 8, 3_086_028_032, 4_000_000),
    "nmt/t_64_16384_32": (64, 16384, 32, 16, 6_040_947_968, 4_000_000),
    "nmt/bilingual": (6, 8192, 16, 1, 375_409_920, 260_000),
    "nmt/large_batch": (6, 8192, 16, 1, 375_409_920, 4_000_000),
}


def settings(experiment: str, *words: str) -> dict[str, Any]:
    """Returns the settings at full size, as a user would start the experiment."""
    root = [] if experiment.startswith("nmt_small/") else ["data.root=/data"]
    config = composed(f"experiment={experiment}", *root, *words)
    Settings.from_config(config)
    return config


# --- translation


def parameters(config: dict[str, Any]) -> int:
    with torch.device("meta"):
        return sum(value.numel() for layer in build_model(config["model"]) for value in layer.build().parameters())


@pytest.mark.parametrize("name", TRANSLATION)
def test_each_is_the_paper_s_model_and_recipe(name: str) -> None:
    config = settings(name)
    model, (L, H, A, K, count, tokens) = config["model"], TRANSLATION[name]
    assert (model["L"], model["H"], model["A"], model["d_model"], config["pipeline"]["K"]) == (L, H, A, 1024, K)
    assert (config["data"]["batch_tokens"], model["positions"]) == (tokens, "sinusoids")
    assert parameters(config) == count
    assert config["optimizer"]["_target_"] == "gpipe_cli.optim.adafactor.Adafactor"
    assert (config["optimizer"]["lr"], config["optimizer"]["beta1"], config["optimizer"]["clip"]) == (1.0, 0.9, 1.0)
    assert (config["lr_schedule"]["factor"], config["lr_schedule"]["warmup_steps"]) == (3.0, 40_000)
    assert (config["task"]["label_smoothing"], model["dropout"], config["data"]["temperature"]) == (0.1, 0.1, 5)
    assert (config["task"]["generation"]["beam"], config["task"]["generation"]["length_exponent"]) == (8, 0.5)
    assert config["task"]["generation"]["per_language_at_end"] is None  # whole test sets, as figure 3
    assert config["data"]["evaluation_per_language"] is None


def test_the_small_family_has_the_paper_s_proportions() -> None:
    narrow, wide, deep = (settings(f"nmt_small/{name}") for name in ("narrow", "wide", "deep"))
    assert wide["model"]["H"] == 2 * deep["model"]["H"] and wide["model"]["A"] == 2 * deep["model"]["A"]
    assert deep["model"]["L"] == 2 * wide["model"]["L"] == 4 * narrow["model"]["L"]
    assert parameters(wide) == pytest.approx(parameters(deep), rel=0.005)
    for config in (wide, deep):
        assert {**config, "model": 0, "name": 0} == {**narrow, "model": 0, "name": 0}


def test_a_tiny_step_of_the_small_family(tmp_path: Path) -> None:
    words = ["debug=tiny", "trainer.steps=1", "trainer.patience=null", "experiment=nmt_small/bilingual"]
    check(train_inline(tmp_path, *words)[0])


@pytest.mark.parametrize(
    "name", ["nmt/t_64_16384_32", "nmt_small/messages", pytest.param("nmt/bilingual", marks=pytest.mark.slow)]
)
def test_a_tiny_step_on_opus_s_layout(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_CACHE", str(tmp_path / "cache"))
    root = opus(tmp_path / "opus")
    words = ["debug=tiny", "trainer.steps=1", "trainer.patience=null", f"data.root={root}", "pipeline.workers=1"]
    words += [f"data.{side}vocabulary=6000" for side in ("source_", "target_")] if name == "nmt/bilingual" else []
    summary, events = train_inline(tmp_path / "run", f"experiment={name}", *words)
    check(summary)
    smaller = [event["text"] for event in events if "the text supports" in event.get("text", "")]
    assert len(smaller) == (name == "nmt/bilingual"), "300 pairs support fewer pieces, which is said once"
    languages = {found for found in summary["evaluation"] if found.startswith("bleu/")}
    assert languages == ({"bleu/de"} if name == "nmt/bilingual" else {"bleu/de", "bleu/fi", "bleu/sw"})


# --- images: what they set


@pytest.mark.parametrize("name", TRANSFER)
def test_a_transfer_has_the_paper_s_classes_and_whole_epochs(name: str) -> None:
    images, classes = IMAGES[name]
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


# --- images: what they do


def train_tiny(folder: Path, experiment: str, *words: str) -> dict[str, Any]:
    root = folder / "data"
    MAKERS["imagenet" if experiment in IMAGENET else experiment.partition("/")[2]](root)
    summary, _ = train_inline(folder / "run", *TINY, f"experiment={experiment}", f"data.root={root}", *words)
    return summary


def check(summary: dict[str, Any]) -> None:
    assert summary["steps"] == 1 and math.isfinite(summary["loss"]) and summary["skipped_updates"] == 0
    assert summary["evaluation"]["nll"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [name for name in IMAGENET if name != PRETRAINING])
def test_a_tiny_step_on_imagenet_s_layout(experiment: str, tmp_path: Path) -> None:
    check(train_tiny(tmp_path, experiment))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains on ImageNet's layout; returns the checkpoint."""
    folder = tmp_path_factory.mktemp("imagenet")
    check(train_tiny(folder, PRETRAINING))
    checkpoint, _ = resolve(str(folder / "run"), folder / "new", None)
    assert checkpoint is not None
    return checkpoint.path


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "food101" else pytest.mark.slow(2)) for name in TRANSFER if name in MAKERS],
)
def test_a_tiny_transfer_on_each_data_set_s_layout(
    name: str, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_images.accept_any_cifar(monkeypatch)
    check(train_tiny(tmp_path, f"transfer/{name}", f"checkpoint.init_from={pretrained}"))
