"""Tests images in tar files: the same examples as in class folders, in any order of reading; every defect is named."""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import torch
from image_tars import add, write_shards
from torch import Tensor

from gpipe_cli.data.images import tars
from gpipe_cli.data.images.source import ImageSource
from gpipe_cli.data.source import Batch, no_report
from gpipe_cli.errors import ConfigurationError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_images.image_folder(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.fixture
def root(folder: Path, tmp_path: Path) -> Path:
    """Writes 12 training images in three shards and 6 evaluation images in two."""
    write_shards(folder / "train", tmp_path / "root" / "birds-train", 5)
    write_shards(folder / "val", tmp_path / "root" / "birds-validation", 4)
    return tmp_path / "root"


def opened(root: Path, **changes: Any) -> ImageSource:
    settings: dict[str, Any] = {"classes": 3, "image_size": 16, "batch_size": 5, "workers": 0, "drop_last": False}
    source = ImageSource(**{"dataset": "image_folder", "root": str(root), **settings, **changes})
    source.prepare(no_report)
    return source


def tensors(batches: Iterator[Batch], count: int | None = None) -> list[Tensor]:
    parts = [part for batch in islice(batches, count) for part in batch.micro_batches]
    return [tensor for inputs, targets in parts for tensor in (*inputs, *targets)]


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def refusal(root: Path, **changes: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        opened(root, **changes)
    return str(error.value)


def rewrite(tar: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Writes a tar again after its contents by name were changed."""
    with tarfile.open(tar) as archive:
        content = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    change(content)
    with tarfile.open(tar, "w") as archive:
        for name, data in content.items():
            add(archive, name, data)


@pytest.mark.parametrize("dataset", ["image_folder", "imagenet"])
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_give_the_examples_of_class_folders(root: Path, folder: Path, dataset: str, workers: int) -> None:
    shards, files = opened(root, dataset=dataset, workers=workers), opened(folder)
    assert equal(tensors(shards.train(None, 2, 0, 1), 7), tensors(files.train(None, 2, 0, 1), 7))
    assert equal(tensors(shards.evaluation(2)), tensors(files.evaluation(2)))
    assert shards.class_names == ("0", "1", "2")


def test_shards_in_the_folder_of_their_split_are_found_and_a_run_resumes_among_them(root: Path) -> None:
    for split in ("train", "val"):
        (root / split).mkdir()
        for tar in sorted(root.glob(f"*-{split}*.tar")):
            tar.rename(root / split / tar.name)
    source = opened(root)
    batches = list(islice(source.train(None, 2, 0, 1), 5))
    assert equal(tensors(opened(root).train(batches[2].position, 2, 0, 1), 2), tensors(iter(batches[3:])))


def test_the_index_is_made_once_and_again_when_a_tar_has_changed(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(root).fingerprint()
    assert len(list((cache / "tars").glob("*.npz"))) == 2
    monkeypatch.setattr(tars, "_members", None)  # not called
    assert opened(root).fingerprint() == first
    monkeypatch.undo()
    monkeypatch.setenv("GPIPE_CACHE", str(cache))
    rewrite(root / "birds-train-0002.tar", lambda content: [content.pop(name) for name in list(content)[:3]])
    assert opened(root).fingerprint() != first
    os.utime(root / "birds-validation-0001.tar", (0, 0))
    opened(root)
    assert len(list((cache / "tars").glob("*.npz"))) == 4


def test_a_tar_may_not_be_of_both_splits_and_parts_of_words_do_not_count(root: Path) -> None:
    for name in ("interval.tar", "retrain.tar", ".train.tar"):
        (root / name).touch()
    assert len(opened(root)._train_set) == 12
    (root / "birds_train-val.tar").touch()
    assert f"data.root={root}: birds_train-val.tar may be of each of data.folders: rename it" in refusal(root)


TRAIN, VAL = "birds-train-0001.tar", "birds-validation-0001.tar"
FIFTH = "n00000001_1"  # the first image of that training shard


@pytest.mark.parametrize(
    ("tar", "change", "message"),
    [
        (TRAIN, lambda all: all.pop(f"./{FIFTH}.cls"), f"{TRAIN} has images without the .cls files: {FIFTH}"),
        (TRAIN, lambda all: all.pop(f"./{FIFTH}.jpg"), f"{TRAIN} has no images for the .cls files: {FIFTH}"),
        (TRAIN, lambda all: all.update({f"./{FIFTH}.cls": b"cat"}), f"{TRAIN}/{FIFTH}.cls: b'cat' is not the number"),
        (
            TRAIN,
            lambda all: [all.pop(name) for name in list(all) if "cls" in name],
            f"{TRAIN} has images without the .cls",
        ),
        (
            "birds-train-0000.tar",
            lambda all: [all.pop(name) for name in list(all) if "cls" in name],
            "-0000.tar has none",
        ),
        (TRAIN, lambda all: all.update({f"./{FIFTH}.mask.png": b""}), "has two images for one of the .cls files"),
        (VAL, lambda all: all.update({"./n00000002_0.cls": b"3"}), f"{VAL}/n00000002_0.jpg is of class '3', which the"),
        (VAL, lambda all: all.clear(), None),
    ],
)
def test_a_defect_of_a_shard_is_named(tar: str, change: Any, message: str | None, root: Path) -> None:
    rewrite(root / tar, change)
    if message is None:
        assert "12 training and 4 evaluation images, not 12 and 6" in refusal(root, images=[12, 6])
    else:
        assert message in refusal(root)


@pytest.mark.parametrize("end", [100, 512, 700, 1536, -10_240, -8_000])
def test_a_tar_that_is_cut_off_is_named_wherever_that_is(end: int, root: Path) -> None:
    """The end of 10,240 bytes has the last image too; a tar is whole with the first 512 of its zeros."""
    content = (root / TRAIN).read_bytes()
    (root / TRAIN).write_bytes(content[:end])
    assert f"{root / TRAIN}" in refusal(root)
    assert "cut off or damaged after" in refusal(root) or "it must be a whole tar" in refusal(root)


def test_a_damaged_header_and_a_packed_tar_are_named(root: Path) -> None:
    content = bytearray((root / TRAIN).read_bytes())
    place = content.index(b"./n00000001_2.cls")
    content[place : place + 100] = b"x" * 100
    (root / TRAIN).write_bytes(content)
    assert f"{TRAIN} is cut off or damaged after ./n00000001_2.jpg" in refusal(root)
    (root / TRAIN).write_bytes(gzip.compress(content))
    assert f"{root / TRAIN} after its start: " in refusal(root)


def test_a_broken_image_in_a_tar_is_named_and_left_out(root: Path) -> None:
    rewrite(root / VAL, lambda content: content.update({"./n00000002_1.jpg": b"no image"}))
    source = opened(root, broken_images_limit=1)
    assert sum(len(tensor) for tensor in tensors(source.evaluation(1))[1::2]) == 5
    assert list(source.broken_images) == [str(root / VAL / "n00000002_1.jpg")]


def test_a_link_in_a_tar_is_named(root: Path) -> None:
    with tarfile.open(root / TRAIN, "a") as archive:
        link = tarfile.TarInfo("linked.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, f"{FIFTH}.jpg"
        archive.addfile(link)
    assert f"{TRAIN}/linked.jpg is a link" in refusal(root)


def test_a_tar_without_classes_is_refused(root: Path) -> None:
    for tar in root.glob("*train*"):
        rewrite(tar, lambda content: [content.pop(name) for name in list(content) if name.endswith("cls")])
    assert "birds-train-0000.tar/n00000000_0.jpg has no .cls file with its class" in refusal(root)
