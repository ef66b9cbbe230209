"""Tests images in files: the layouts of the real data sets, half-unpacked folders and broken files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import torch
from tiny_images import CLASSES, COLOURS, opened, refusal
from torch import Tensor

from gpipe_cli.data.source import Batch
from gpipe_cli.errors import ConfigurationError


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """Makes 12 training and 6 evaluation images in three classes."""
    tiny_images.image_folder(tmp_path / "images")
    return tmp_path / "images"


def first(batches: Iterator[Batch], count: int) -> list[Batch]:
    return list(islice(batches, count))


def whole(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns (images, labels) of all micro-batches of a mini-batch together."""
    inputs, targets = zip(*batch.micro_batches, strict=True)
    return torch.cat([of[0] for of in inputs]), torch.cat([of[0] for of in targets])


# --- the layouts of the real data sets


@pytest.mark.parametrize("make", tiny_images.DATASETS, ids=lambda make: str(make.__name__))
def test_each_data_set_is_read_in_its_own_layout(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_images.accept_any_cifar(monkeypatch)
    source = opened(tmp_path / "root", **make(tmp_path / "root"))
    assert len(source.class_names) == CLASSES
    for batch in [*first(source.train(None, 2, 0, 1), 2), *source.evaluation(2)]:
        inputs, labels = whole(batch)
        colours = torch.tensor(COLOURS, dtype=torch.float64)[labels]
        assert torch.allclose(inputs.double().mean((2, 3)), colours, atol=4)  # JPEG


@pytest.mark.parametrize("dataset", ["imagenet", "cifar10", "oxford_pets", "food101", "fgvc_aircraft"])
def test_an_empty_root_is_told_where_to_read_what_belongs_there(dataset: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, dataset=dataset)
    assert f"data.root={tmp_path}" in message and "docs/images.md says what belongs there" in message
    assert ("data.download=true fetches it (5 GB)" in message) == (dataset == "food101")


# --- half-unpacked image folders


def unsorted(root: Path) -> None:
    shutil.rmtree(root / "val")
    tiny_images.save_image(root / "val" / "ILSVRC2012_val_00000001.JPEG", 0)


@pytest.mark.parametrize(
    ("spoilt", "changes", "message"),
    [
        (lambda root: (root / "val").rename(root / "dev"), {}, "has no folder 'val', only dev, train"),
        (unsorted, {}, "no class folders, only ILSVRC2012_val_00000001.JPEG"),
        (lambda root: (root / "train" / "n00000009").mkdir(), {}, "class folders without an image"),
        (
            lambda root: tiny_images.save_image(root / "val" / "zebra" / "1.png", 0),
            {},
            "is of class 'zebra'",
        ),
        (lambda root: None, {"classes": 1000}, "has 3 classes, but data.classes=1000"),
        (lambda root: None, {"images": [12, 7]}, "12 training and 6 evaluation images, not 12 and 7"),
    ],
)
def test_what_is_missing_in_a_folder_is_named(
    spoilt: Any, changes: dict[str, Any], message: str, own_folder: Path
) -> None:
    spoilt(own_folder)
    assert message in refusal(own_folder, **changes)


def test_an_evaluation_class_may_be_missing_and_the_others_keep_their_numbers(own_folder: Path) -> None:
    shutil.rmtree(own_folder / "val" / "n00000001")
    labels = torch.cat([whole(batch)[1] for batch in opened(own_folder).evaluation(1)])
    assert labels.tolist() == [0, 0, 2, 2]


# --- broken images


def spoil(root: Path, *names: str) -> list[str]:
    for name in names:
        path = root / name
        path.write_bytes(path.read_bytes()[:300])
    return [str(root / name) for name in names]


BROKEN = ("train/n00000000/n00000000_3.JPEG", "train/n00000001/n00000001_0.JPEG")  # numbers 3 and 4 of the list


def test_broken_training_images_are_replaced_by_the_next_good_one_named_and_counted(
    own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = first(opened(own_folder, batch_size=12).train(None, 1, 0, 1), 1)[0]
    paths = spoil(own_folder, *BROKEN)
    source = opened(own_folder, batch_size=12, broken_images_limit=2)
    labels = whole(first(source.train(None, 1, 0, 1), 1)[0])[1]
    assert sorted(source.broken_images) == paths
    assert all(path in caplog.text for path in paths)
    assert (labels != whole(good)[1]).sum() == 1  # number 3 was of class 0, and 5, which takes its place, is of 1


@pytest.mark.parametrize("workers", [0, 1])
def test_more_broken_images_than_the_limit_end_the_run_with_the_last_one_s_name(own_folder: Path, workers: int) -> None:
    spoil(own_folder, *BROKEN)
    source = opened(own_folder, workers=workers, broken_images_limit=1)
    with pytest.raises(ConfigurationError, match=r"n0000000\d_\d\.JPEG is broken .*data\.broken_images_limit is 1"):
        first(source.train(None, 1, 0, 1), 3)


def test_broken_evaluation_images_are_left_out_and_the_parts_stay_even(own_folder: Path) -> None:
    spoil(own_folder, "val/n00000000/n00000000_0.JPEG", "val/n00000000/n00000000_1.JPEG")
    source = opened(own_folder, batch_size=6, broken_images_limit=2)
    (batch,) = source.evaluation(2)
    assert [labels.tolist() for _, (labels,) in batch.micro_batches] == [[1, 1], [2, 2]]
    assert len(source.broken_images) == 2
