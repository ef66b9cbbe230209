"""Writes the paper's image data sets in miniature, each in the folder layout of the real one.

Every image is of one colour that tells its class (`COLOURS`), so that a test can see whether image and label belong
together after any transform.
"""

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from refusals import refusal_of

from gpipe_cli.data.images.source import ImageSource
from gpipe_cli.data.source import no_report

CLASSES = 3
COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200))
TRAIN, EVALUATION = 4, 2  # images of a class
SPLITS = (TRAIN, EVALUATION)


def save_image(path: Path, label: int, number: int = 0) -> None:
    """Writes a JPEG or PNG of the class's colour; sizes differ."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (24 + 2 * number, 20 + label), COLOURS[label]).save(path)


def image_folder(root: Path, folders: tuple[str, str] = ("train", "val")) -> dict[str, Any]:
    for folder, count in zip(folders, SPLITS, strict=True):
        for label in range(CLASSES):
            for number in range(count):
                save_image(root / folder / f"n0000000{label}" / f"n0000000{label}_{number}.JPEG", label, number)
    return {"dataset": "image_folder", "folders": folders}


def imagenet(root: Path) -> dict[str, Any]:
    return image_folder(root) | {"dataset": "imagenet", "images": [CLASSES * count for count in SPLITS]}


def cifar10(root: Path) -> dict[str, Any]:
    base = root / "cifar-10-batches-py"
    base.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        _save_pickle(base / name, {"data": _rows(), "labels": list(range(CLASSES))})
    _save_pickle(base / "batches.meta", {"label_names": [f"class {number}" for number in range(CLASSES)]})
    return {"dataset": "cifar10"}


def oxford_pets(root: Path) -> dict[str, Any]:
    base = root / "oxford-iiit-pet"
    (base / "annotations").mkdir(parents=True)
    for split, count in zip(("trainval", "test"), SPLITS, strict=True):
        rows = [(f"some_breed{label}_{split}{number}", label) for label in range(CLASSES) for number in range(count)]
        for name, label in rows:
            save_image(base / "images" / f"{name}.jpg", label)
        lines = [f"{name} {label + 1} 1 1\n" for name, label in rows]
        (base / "annotations" / f"{split}.txt").write_text("".join(lines))
    return {"dataset": "oxford_pets"}


def food101(root: Path) -> dict[str, Any]:
    base = root / "food-101"
    (base / "meta").mkdir(parents=True)
    for split, count in zip(("train", "test"), SPLITS, strict=True):
        dishes = [f"dish_{label}" for label in range(CLASSES)]
        lists = {dish: [f"{dish}/{split}{number}" for number in range(count)] for dish in dishes}
        for label, names in enumerate(lists.values()):
            for name in names:
                save_image(base / "images" / f"{name}.jpg", label)
        (base / "meta" / f"{split}.json").write_text(json.dumps(lists))
    return {"dataset": "food101"}


Maker = Callable[[Path], dict[str, Any]]
DATASETS: list[Maker] = [imagenet, cifar10, oxford_pets, food101]


def opened(root: Path, **changes: Any) -> ImageSource:
    """Returns a prepared source of images of 16 pixels a side, in mini-batches of five."""
    settings = {"dataset": "image_folder", "classes": CLASSES, "image_size": 16, "batch_size": 5, "workers": 0}
    source = ImageSource(root=str(root), **{"drop_last": False, **settings, **changes})
    source.prepare(no_report)
    return source


refusal = partial(refusal_of, opened)


def accept_any_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the checksums by which torchvision refuses files that are not the published ones."""
    from torchvision.datasets import CIFAR10

    for key in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, key, [[name, None] for name, _ in getattr(CIFAR10, key)])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": None})


def _rows() -> np.ndarray[Any, Any]:
    """Returns one image of each class in CIFAR's layout: all red values, all green, all blue."""
    return np.array([np.repeat(colour, 32 * 32) for colour in COLOURS], dtype=np.uint8)


def _save_pickle(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(pickle.dumps(value))


# -- tar files ---------------------------------------------------------------------------------------------------------


def write_shards(split: Path, pattern: Path, images_of_shard: int) -> None:
    """Writes the class folders of a split as shards `pattern-0000.tar`, …, in order, and numbers the classes."""
    classes = sorted(path.name for path in split.iterdir())
    images = sorted(split.glob("*/*"))
    pattern.parent.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(images), images_of_shard):
        with tarfile.open(f"{pattern}-{first // images_of_shard:04}.tar", "w") as archive:
            for image in images[first : first + images_of_shard]:
                label = str(classes.index(image.parent.name)).encode()
                for ending, content in (("jpg", image.read_bytes()), ("cls", label), ("json", b"{}")):
                    add_to_tar(archive, f"./{image.stem}.{ending}", content)


def add_to_tar(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
