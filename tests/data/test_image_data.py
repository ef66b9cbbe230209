"""Tests image sources: order, workers, replicas, broken files and half-unpacked folders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import torch
from tiny_images import CLASSES, COLOURS
from torch import Tensor

from gpipe_cli.data.images.digits import DigitsSource
from gpipe_cli.data.images.source import ImageSource
from gpipe_cli.data.source import Batch, no_report
from gpipe_cli.errors import ConfigurationError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes 12 training and 6 evaluation images in three classes."""
    root = tmp_path_factory.mktemp("images")
    tiny_images.image_folder(root)
    return root


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    """Makes a copy of the folder that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "images"))


def images(root: Path, **changes: Any) -> ImageSource:
    settings = {"dataset": "image_folder", "classes": CLASSES, "image_size": 16, "batch_size": 5, "workers": 0}
    settings |= {"crop_area": (0.3, 1.0), "brightness": 0.1, "chroma": 0.1, "cutout": 0.25, "drop_last": False}
    source = ImageSource(root=str(root), **{**settings, **changes})
    source.prepare(no_report)
    return source


def digits(root: Path, **changes: Any) -> DigitsSource:
    source = DigitsSource(**{"batch_size": 500, **changes})
    source.prepare(no_report)
    return source


every_source = pytest.mark.parametrize("make", [images, digits], ids=lambda make: str(make.__name__))


def first(batches: Iterator[Batch], count: int) -> list[Batch]:
    return list(islice(batches, count))


def whole(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns (images, labels) of all micro-batches of a mini-batch together."""
    return torch.cat([inputs[0] for inputs, _ in batch.micro_batches]), torch.cat(
        [targets[0] for _, targets in batch.micro_batches]
    )


def equal(one: list[Batch], two: list[Batch]) -> bool:
    pairs = [(whole(a), whole(b)) for a, b in zip(one, two, strict=True)]
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


def refusal(root: Path | None, **changes: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        images(root or Path("/none"), **changes)
    return str(error.value)


# --- every source of images


@every_source
def test_a_micro_batch_is_bytes_of_three_channels_and_int64_labels(make: Any, folder: Path) -> None:
    (inputs,), (labels,) = first(make(folder).train(None, 2, 0, 1), 1)[0].micro_batches[0]
    assert (inputs.dtype, inputs.shape[1], labels.dtype) == (torch.uint8, 3, torch.int64)
    assert len(inputs) == len(labels)


@every_source
def test_resuming_in_the_middle_of_an_epoch_goes_on_with_the_same_images(make: Any, folder: Path) -> None:
    batches = first(make(folder).train(None, 2, 0, 1), 7)
    assert equal(first(make(folder).train(batches[3].position, 2, 0, 1), 3), batches[4:])


@every_source
def test_replicas_and_micro_batches_only_divide_the_mini_batch(make: Any, folder: Path) -> None:
    one = first(make(folder).train(None, 1, 0, 1), 2)
    for number in range(2):
        halves = [first(make(folder).train(None, 1, replica, 2), 2)[number] for replica in range(2)]
        assert equal([Batch([*halves[0].micro_batches, *halves[1].micro_batches], None)], [one[number]])


@every_source
@pytest.mark.parametrize("M", [1, 2, 4])
def test_evaluation_has_every_image_once_for_any_M(make: Any, folder: Path, M: int) -> None:
    batches = list(make(folder, batch_size=4).evaluation(M))
    in_one = torch.cat([whole(batch)[0] for batch in make(folder).evaluation(1)])
    assert torch.equal(torch.cat([whole(batch)[0] for batch in batches]), in_one)
    assert len(in_one) == (6 if make is images else 360)


# --- files: loader processes, replicas


def test_loader_processes_change_neither_order_nor_augmentation(folder: Path) -> None:
    alone, with_two = (first(images(folder, workers=workers).train(None, 2, 0, 1), 5) for workers in (0, 2))
    assert equal(alone, with_two)
    assert [batch.position for batch in alone] == [batch.position for batch in with_two]


def test_replicas_may_share_an_evaluation_without_reading_an_image_twice(folder: Path) -> None:
    source = images(folder, batch_size=2)
    every = list(source.evaluation(1))
    assert equal(list(source.evaluation_share(1, 0, 2)), every[0::2])
    assert equal(list(source.evaluation_share(1, 1, 2)), every[1::2])


# --- files: the layouts of the real data sets


@pytest.mark.parametrize("make", tiny_images.DATASETS, ids=lambda make: str(make.__name__))
def test_each_data_set_is_read_in_its_own_layout(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_images.accept_any_cifar(monkeypatch)
    plain = {"crop_area": None, "brightness": 0, "chroma": 0, "cutout": 0}
    source = images(tmp_path / "root", **plain, **make(tmp_path / "root"))
    assert len(source.class_names) == CLASSES
    for batch in [*first(source.train(None, 2, 0, 1), 2), *source.evaluation(2)]:
        inputs, labels = whole(batch)
        colours = torch.tensor(COLOURS, dtype=torch.float64)[labels]
        assert torch.allclose(inputs.double().mean((2, 3)), colours, atol=4)  # JPEG


@pytest.mark.parametrize("dataset", ["imagenet", "cifar10", "oxford_pets", "food101", "fgvc_aircraft"])
def test_an_empty_root_is_told_what_belongs_there_and_where_to_get_it(dataset: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, dataset=dataset)
    assert f"data.root={tmp_path}" in message
    assert "must hold" in message
    assert "http" in message and ("data.download=true (5 GB)" in message) == (dataset == "food101")


# --- files: half-unpacked image folders


def unsorted(root: Path) -> None:
    shutil.rmtree(root / "val")
    tiny_images.save_image(root / "val" / "ILSVRC2012_val_00000001.JPEG", 0)


@pytest.mark.parametrize(
    ("spoilt", "changes", "message"),
    [
        (lambda root: (root / "val").rename(root / "dev"), {}, "has no folder 'val', only dev, train"),
        (unsorted, {}, "no class folders, only ILSVRC2012_val_00000001.JPEG"),
        (lambda root: (root / "train" / "n00000009").mkdir(), {}, "class folders without an image"),
        (lambda root: tiny_images.save_image(root / "val" / "zebra" / "1.png", 0), {}, "has not: zebra"),
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
    labels = torch.cat([whole(batch)[1] for batch in images(own_folder).evaluation(1)])
    assert labels.tolist() == [0, 0, 2, 2]


# --- files: broken images


def spoil(root: Path, *names: str) -> list[str]:
    for name in names:
        path = root / name
        path.write_bytes(path.read_bytes()[:300])
    return [str(root / name) for name in names]


BROKEN = ("train/n00000000/n00000000_3.JPEG", "train/n00000001/n00000001_0.JPEG")  # numbers 3 and 4 of the list


def test_broken_training_images_are_replaced_by_the_next_good_one_named_and_counted(
    own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = first(images(own_folder, batch_size=12).train(None, 1, 0, 1), 1)[0]
    paths = spoil(own_folder, *BROKEN)
    source = images(own_folder, batch_size=12, broken_images_limit=2)
    labels = whole(first(source.train(None, 1, 0, 1), 1)[0])[1]
    assert sorted(source.broken_images) == paths
    assert all(path in caplog.text for path in paths)
    assert (labels != whole(good)[1]).sum() == 1  # number 3 was of class 0, and 5, which takes its place, is of 1


@pytest.mark.parametrize("workers", [0, 1])
def test_more_broken_images_than_the_limit_end_the_run_with_the_last_one_s_name(own_folder: Path, workers: int) -> None:
    spoil(own_folder, *BROKEN)
    source = images(own_folder, workers=workers, broken_images_limit=1)
    with pytest.raises(ConfigurationError, match=r"n0000000\d_\d\.JPEG is broken .*data\.broken_images_limit is 1"):
        first(source.train(None, 1, 0, 1), 3)


def test_broken_evaluation_images_are_left_out_and_the_parts_stay_even(own_folder: Path) -> None:
    spoil(own_folder, "val/n00000000/n00000000_0.JPEG", "val/n00000000/n00000000_1.JPEG")
    source = images(own_folder, batch_size=6, broken_images_limit=2)
    (batch,) = source.evaluation(2)
    assert [labels.tolist() for _, (labels,) in batch.micro_batches] == [[1, 1], [2, 2]]
    assert len(source.broken_images) == 2
