"""Tests that every layout of images gives the examples of class folders, in their order, and every defect is named."""

import gzip
import shutil
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import torch
from tiny_images import add_to_tar, write_shards
from torch import Tensor

from gpipe_cli.data.images import layout, tars
from gpipe_cli.data.images.datasets import open_images, read_folder
from gpipe_cli.data.source import Batch, no_report
from gpipe_cli.errors import ConfigurationError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


WNIDS = ("n01440764", "n01443537", "n01484850")
LABELS = (2, 0, 1, 1, 0, 2)  # class of each evaluation image, in the order of their names


def name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08}"


def class_folders(root: Path) -> None:
    for label, wnid in enumerate(WNIDS):
        for number in range(4):
            tiny_images.save_image(root / "train" / wnid / f"{wnid}_{number}.JPEG", label, number)
    for number, label in enumerate(LABELS, 1):
        tiny_images.save_image(root / "val" / WNIDS[label] / f"{name(number)}.JPEG", label, number)


IMAGENET: dict[str, Any] = {"dataset": "imagenet", "images": [12, 6]}
opened = partial(tiny_images.opened, **IMAGENET)
refusal = partial(tiny_images.refusal, **IMAGENET)


def tensors(batches: Iterator[Batch], count: int | None = None) -> list[Tensor]:
    parts = [part for batch in islice(batches, count) for part in batch.micro_batches]
    return [tensor for inputs, targets in parts for tensor in (*inputs, *targets)]


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def shards(root: Path) -> None:
    """Writes 12 training images in three shards and 6 evaluation images in two."""
    class_folders(root / "sorted")
    write_shards(root / "sorted" / "train", root / "birds-train", 5)
    write_shards(root / "sorted" / "val", root / "birds-validation", 4)
    shutil.rmtree(root / "sorted")


def shards_in_folders(root: Path) -> None:
    shards(root)
    for split in ("train", "val"):
        (root / split).mkdir()
        for tar in sorted(root.glob(f"*-{split}*.tar")):
            tar.rename(root / split / tar.name)


@pytest.mark.parametrize("write", [shards, shards_in_folders])
def test_every_layout_gives_the_examples_of_class_folders_in_their_order(write: Any, tmp_path: Path) -> None:
    class_folders(tmp_path / "sorted")
    write(tmp_path / "other")
    wanted, source = opened(tmp_path / "sorted"), opened(tmp_path / "other")
    batches = list(islice(source.train(None, 2, 0, 1), 5))
    assert equal(tensors(iter(batches)), tensors(wanted.train(None, 2, 0, 1), 5))
    assert equal(tensors(source.evaluation(2)), tensors(wanted.evaluation(2)))
    assert equal(tensors(source.train(batches[2].position, 2, 0, 1), 2), tensors(iter(batches[3:])))
    assert equal(tensors(opened(tmp_path / "other", workers=2).evaluation(2)), tensors(wanted.evaluation(2)))


def test_classes_named_by_numbers_are_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for number in (10, 2, 0):
            tiny_images.save_image(tmp_path / split / f"{number}" / "a.png", 0)
    assert read_folder(tmp_path / "train", no_report).class_names == ("0", "2", "10")


@pytest.fixture
def unsplit(tmp_path: Path) -> Path:
    """Writes 40 images of each of two classes, without splits, and one of them under another name in its class."""
    for number in range(40):
        for label, of in enumerate(("cat", "dog")):
            tiny_images.save_image(tmp_path / "pets" / of / f"{number}.png", label, number)
    shutil.copy(tmp_path / "pets" / "cat" / "7.png", tmp_path / "pets" / "cat" / "again.png")
    return tmp_path / "pets"


HELD_OUT = {"dataset": "image_folder", "images": None, "classes": 2, "held_out": 0.25}


def test_images_without_splits_are_held_out_by_their_content(unsplit: Path) -> None:
    train, evaluation = open_images("image_folder", str(unsplit), ("train", "val"), 0.25, no_report)
    assert len(train) + len(evaluation) == 81 and 10 < len(evaluation) < 32
    held = {path.name for path in evaluation.paths() if path.parent.name == "cat"}  # type: ignore[attr-defined]
    assert ("7.png" in held) == ("again.png" in held)
    for path in unsplit.rglob("*.png"):
        path.rename(path.with_name(f"renamed_{path.name}"))
    _, renamed = open_images("image_folder", str(unsplit), ("train", "val"), 0.25, no_report)
    names = {path.name.removeprefix("renamed_") for path in renamed.paths() if path.parent.name == "cat"}  # type: ignore[attr-defined]
    assert names == held


def test_a_root_with_a_single_folder_is_entered(unsplit: Path) -> None:
    one, other = (tensors(opened(root, **HELD_OUT).evaluation(1)) for root in (unsplit, unsplit.parent))
    assert equal(one, other)


def test_class_folders_without_splits_are_told_with_what_to_type(unsplit: Path) -> None:
    told = layout.unsplit(unsplit, ["train", "val"])
    assert told and "folders of images: cat, dog. If these are the classes, data.held_out=0.1" in told
    assert "holds out 0 of 81" in refusal(unsplit, **{**HELD_OUT, "held_out": 1e-9})


def test_a_single_class_is_warned_of_with_the_folders_in_it(unsplit: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = unsplit.parent
    for split in ("train", "val"):
        shutil.copytree(unsplit, root / split / "pets")
    opened(root, **{**HELD_OUT, "held_out": None, "classes": 1})
    assert "of one class, 'pets'; the folders in it (cat, dog) may be the classes" in caplog.text


@pytest.mark.parametrize("tar", ["train-0001", "validation-0000"])
def test_a_broken_image_in_a_tar_is_named(tar: str, root: Path) -> None:
    path = root / f"birds-{tar}.tar"
    rewrite(path, lambda content: content.update({next(of for of in content if of.endswith("jpg")): b"no image"}))
    source = opened(root, batch_size=12)
    with pytest.raises(ConfigurationError, match=rf"{path}/.*\.jpg is broken"):
        tensors(chain(islice(source.train(None, 1, 0, 1), 1), source.evaluation(1)))


# --- tars


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shards(tmp_path / "root")
    return tmp_path / "root"


def rewrite(tar: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Writes a tar again after its contents by name were changed."""
    with tarfile.open(tar) as archive:
        content = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    change(content)
    with tarfile.open(tar, "w") as archive:
        for name, data in content.items():
            add_to_tar(archive, name, data)


def test_the_index_is_made_anew_when_a_tar_changes(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(root).fingerprint()
    assert len(list((cache / "tars").glob("*.npy"))) == 2
    with monkeypatch.context() as patched:
        patched.setattr(tars, "_index", None)  # not called
        assert opened(root).fingerprint() == first
    rewrite(root / "birds-train-0002.tar", lambda content: [content.pop(name) for name in list(content)[:3]])
    changed = opened(root, images=None).fingerprint()
    assert changed != first
    for file in (cache / "tars").glob("*.npy"):
        file.write_bytes(b"")
    assert opened(root, images=None).fingerprint() == changed


def test_parts_of_words_name_no_split(root: Path) -> None:
    for other in ("interval.tar", "retrain.tar", ".train.tar"):
        (root / other).touch()
    opened(root)


TRAIN, VAL = "birds-train-0001.tar", "birds-validation-0001.tar"
FIFTH = f"{WNIDS[1]}_1"  # the first image of that training shard
ODD = "has not exactly one image for each .cls file"


@pytest.mark.parametrize(
    ("tar", "change", "message"),
    [
        (TRAIN, lambda all: all.pop(f"./{FIFTH}.cls"), f"{TRAIN} {ODD}: {FIFTH}"),
        (TRAIN, lambda all: all.pop(f"./{FIFTH}.jpg"), f"{TRAIN} {ODD}: {FIFTH}"),
        (TRAIN, lambda all: all.update({f"./{FIFTH}.mask.png": b""}), f"{TRAIN} {ODD}: {FIFTH}"),
        (TRAIN, lambda all: all.update({f"./{FIFTH}.cls": b"cat"}), f"{TRAIN}: ./{FIFTH}.cls holds b'cat', no number"),
        (VAL, lambda all: all.update({f"./{name(1)}.cls": b"3"}), f"{name(1)}.jpg is of class '3', which the training"),
        (VAL, lambda all: all.clear(), "12 training and 4 evaluation images, not 12 and 6"),
    ],
)
def test_a_defect_of_a_shard_is_named(tar: str, change: Any, message: str, root: Path) -> None:
    rewrite(root / tar, change)
    assert message in refusal(root)


def test_a_tar_that_is_cut_off_or_packed_is_named(root: Path) -> None:
    whole = (root / TRAIN).read_bytes()
    for content in (whole[:700], gzip.compress(whole)):
        (root / TRAIN).write_bytes(content)
        assert f"{root / TRAIN}: " in (said := refusal(root)) and "it must be a whole tar" in said
