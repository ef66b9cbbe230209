"""Tests ImageNet as it is downloaded: every layout gives the examples of class folders, every defect is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from imagenet_layouts import (
    DEVKIT,
    KAGGLE,
    LAYOUTS,
    TRUTH,
    VAL,
    WNIDS,
    class_folders,
    flat_with_devkit,
    kaggle,
    name,
    official_tars,
    write_lines,
)
from torch import Tensor

from gpipe_cli.data.images.source import ImageSource
from gpipe_cli.data.source import no_report
from gpipe_cli.errors import ConfigurationError


def opened(root: Path, **changes: Any) -> ImageSource:
    settings = {"classes": len(WNIDS), "images": [12, 6], "image_size": 16, "batch_size": 4, "workers": 0, **changes}
    source = ImageSource("imagenet", root=str(root), **settings)
    source.prepare(no_report)
    return source


def evaluated(source: ImageSource) -> list[tuple[Tensor, Tensor]]:
    parts = [part for batch in source.evaluation(2) for part in batch.micro_batches]
    return [(inputs[0], targets[0]) for inputs, targets in parts]


def refusal(root: Path, **changes: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        opened(root, **changes)
    return str(error.value)


@pytest.mark.parametrize("write", LAYOUTS, ids=lambda write: str(write.__name__))
def test_every_layout_gives_the_examples_of_class_folders_in_their_order(write: Any, tmp_path: Path) -> None:
    class_folders(tmp_path / "sorted")
    write(tmp_path / "other")
    expected, source = opened(tmp_path / "sorted"), opened(tmp_path / "other")
    assert source.class_names == WNIDS and source.fingerprint() == expected.fingerprint()
    sets = [one._evaluation_set.images for one in (source, expected)]
    assert sets[0].fingerprint() == sets[1].fingerprint()
    pairs = zip(evaluated(source), evaluated(expected), strict=True)
    assert all(torch.equal(one, two) for pair in pairs for one, two in zip(*pair, strict=True))
    assert torch.cat([labels for _, labels in evaluated(source)]).tolist() == sorted(VAL)


def without(place: int) -> Callable[[list[str]], list[str]]:
    return lambda lines: lines[:place] + lines[place + 1 :]


def replaced(place: int, line: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [*lines[:place], line, *lines[place + 1 :]]


@pytest.mark.parametrize(
    ("write", "file", "change", "message"),
    [
        (
            flat_with_devkit,
            f"{DEVKIT}/{TRUTH}",
            without(5),
            f"{TRUTH} has no line for images of {{val}}: {name(6)}.JPEG",
        ),
        (flat_with_devkit, f"{DEVKIT}/{TRUTH}", replaced(3, "1001"), f"{TRUTH}, line 4: '1001' is not the number of"),
        (kaggle, KAGGLE, without(6), f"{KAGGLE} has no line for images of {{val}}: {name(1)}.JPEG"),
        (
            kaggle,
            KAGGLE,
            replaced(1, f"{name(6)},n09999999 1 2 3 4"),
            "line 2: class 'n09999999' has no training images",
        ),
        (kaggle, KAGGLE, replaced(3, f"{name(4)}"), f"line 4: '{name(4)}' is not an image, a comma and its class"),
        (kaggle, KAGGLE, replaced(3, f"{name(5)},{WNIDS[0]} 1"), f"line 4: {name(5)} is also in line 3"),
    ],
)
def test_a_defect_of_a_label_file_is_named_with_its_line(
    write: Any, file: str, change: Any, message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    write_lines(tmp_path / file, change((tmp_path / file).read_text().splitlines()))
    (val,) = tmp_path.rglob("val")
    assert message.format(val=val) in refusal(tmp_path)


@pytest.mark.parametrize(
    ("write", "file", "message"),
    [
        (
            kaggle,
            KAGGLE,
            f"val does not tell its classes: data.root={{root}} must have its labels, one of {KAGGLE}, {TRUTH}",
        ),
        (flat_with_devkit, f"{DEVKIT}/map_clsloc.txt", "meta.mat, which says what its numbers mean, is not beside it"),
    ],
)
def test_a_missing_label_file_is_named(write: Any, file: str, message: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / file).unlink()
    assert message.format(root=tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize("write", LAYOUTS[:2], ids=lambda write: str(write.__name__))
def test_a_broken_or_missing_image_is_named_or_counted(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    (image,) = tmp_path.rglob(f"{name(3)}.JPEG")
    image.write_bytes(image.read_bytes()[:300])
    source = opened(tmp_path, broken_images_limit=1)
    assert sum(len(labels) for _, labels in evaluated(source)) == 5
    assert list(source.broken_images) == [str(image)]
    image.unlink()
    assert "12 training and 5 evaluation images, not 12 and 6" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("tar", "image"),
    [("train", f"{WNIDS[1]}.tar/{WNIDS[1]}_2.JPEG"), ("val", f"{name(3)}.JPEG")],
)
def test_a_broken_image_in_an_official_tar_is_named(tar: str, image: str, tmp_path: Path) -> None:
    official_tars(tmp_path)
    path = tmp_path / f"ILSVRC2012_img_{tar}.tar"
    content = bytearray(path.read_bytes())
    begin = content.index(Path(image).name.encode()) + 512  # after its header
    content[begin : begin + 200] = bytes(200)
    path.write_bytes(content)
    source = opened(tmp_path, broken_images_limit=1, batch_size=12)
    next(source.train(None, 1, 0, 1))
    evaluated(source)
    assert list(source.broken_images) == [f"{path}/{image}"]


def test_without_any_layout_the_message_says_what_was_looked_for(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert all(word in message for word in ("train/<wnid>", "ILSVRC/Data/CLS-LOC/", KAGGLE, TRUTH))
