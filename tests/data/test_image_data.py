"""Tests images in files: layouts of the real data sets, half-unpacked folders, unusual and broken files, transforms."""

import io
import shutil
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_images
import torch
from PIL import ExifTags, Image
from tiny_images import COLOURS, opened, refusal
from torch import Tensor

from gpipe_cli.data.images.files import BrokenImage, ImageFiles, decode
from gpipe_cli.data.images.transforms import GREY, cut_out, shift_colours
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
    for batch in [*first(source.train(None, 2, 0, 1), 2), *source.evaluation(2)]:
        inputs, labels = whole(batch)
        colours = torch.tensor(COLOURS, dtype=torch.float64)[labels]
        assert torch.allclose(inputs.double().mean((2, 3)), colours, atol=4)  # JPEG


@pytest.mark.parametrize("dataset", ["imagenet", "cifar10", "oxford_pets", "food101", "fgvc_aircraft"])
def test_an_empty_root_is_told_where_to_read_what_belongs_there(dataset: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, dataset=dataset)
    assert f"data.root={tmp_path}" in message and "docs/images.md says what belongs there" in message


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
        (lambda root: tiny_images.save_image(root / "val" / "zebra" / "1.png", 0), {}, "is of class 'zebra'"),
        (lambda root: None, {"classes": 1000}, "has 3 classes, but data.classes=1000"),
        (lambda root: None, {"images": [12, 7]}, "12 training and 6 evaluation images, not 12 and 7"),
    ],
)
def test_what_a_folder_lacks_is_named(spoilt: Any, changes: dict[str, Any], message: str, own_folder: Path) -> None:
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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_ends_the_run_with_its_name(workers: int, own_folder: Path) -> None:
    (path,) = spoil(own_folder, "train/n00000000/n00000000_3.JPEG")
    with pytest.raises(ConfigurationError, match=rf"^{path} is broken \(.*\).*: replace it"):
        first(opened(own_folder, workers=workers).train(None, 1, 0, 1), 3)
    (path,) = spoil(own_folder, "val/n00000000/n00000000_0.JPEG")
    with pytest.raises(ConfigurationError, match=rf"^{path} is broken"):
        first(opened(own_folder, workers=workers).evaluation(1), 3)


# --- transforms


def test_chroma_moves_red_green_and_blue_as_cb_and_cr_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, dtype: torch.tensor([0.5, 1.0, 0.75], dtype=dtype))
    image = torch.full((3, 1, 1), 100, dtype=torch.uint8)  # draws: no brightness, Cb + 0.1, Cr + 0.05
    # 255 · (1.402 · 0.05, −0.344136 · 0.1 − 0.714136 · 0.05, 1.772 · 0.1) = 17.9, −17.9, 45.2
    assert shift_colours(image, 0.125, 0.1).flatten().tolist() == [118, 82, 145]


@pytest.mark.parametrize(
    ("centre", "rows", "columns"), [((8, 8), slice(6, 10), slice(6, 10)), ((0, 15), slice(0, 2), slice(13, 16))]
)
def test_cutout_fills_a_square_around_any_pixel(
    centre: tuple[int, int], rows: slice, columns: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = iter(centre)
    monkeypatch.setattr(torch, "randint", lambda high, size: torch.tensor(next(draws)))
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    expected = image.clone()
    expected[:, rows, columns] = GREY
    assert torch.equal(cut_out(image, 0.25), expected)
    assert not image.any()


# -- files of unusual kinds; none can fill the memory ----------------------------------------------------------------


RAMP = np.linspace(0, 255, 64).reshape(8, 8)  # an image's values, from 0 to 255


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def array(values: np.ndarray[Any, Any], kind: str, **options: Any) -> bytes:
    return encoded(Image.fromarray(values), kind, **options)


WIDE = np.round(RAMP * 257)
EIGHT_BITS = {
    "16-bit PNG": array(WIDE.astype(np.uint16), "PNG"),
    "16-bit TIFF": array(WIDE.astype(np.uint16), "TIFF"),
    "16-bit PGM": b"P5 8 8 65535\n" + WIDE.astype(">u2").tobytes(),
    "float TIFF": array((RAMP / 255).astype(np.float32), "TIFF"),
    "8-bit TIFF": array(np.round(RAMP).astype(np.uint8), "TIFF"),
}


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_values_of_more_bits_are_scaled_to_bytes(kind: str) -> None:
    expected = torch.from_numpy(RAMP).expand(3, 8, 8)
    assert (decode(io.BytesIO(EIGHT_BITS[kind])) - expected).abs().max() <= 1


def tiff_of_12_bits(values: np.ndarray[Any, Any]) -> bytes:
    """Returns a TIFF of 12 bits a sample, packed without gaps, which Pillow reads and does not write."""
    bits = "".join(f"{value:012b}" for value in values.ravel().tolist())
    data = int(bits, 2).to_bytes(len(bits) // 8, "big")
    height, width = values.shape
    short = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 277: 1, 278: height}
    tags = {**{tag: (3, value) for tag, value in short.items()}, 273: (4, 8), 279: (4, len(data))}
    entries = [struct.pack("<HHII", tag, kind, 1, value) for tag, (kind, value) in sorted(tags.items())]
    head = b"II*\0" + struct.pack("<I", 8 + len(data))
    return head + data + struct.pack("<H", len(tags)) + b"".join(entries) + bytes(4)


def test_fewer_bits_than_16_are_told_by_the_file() -> None:
    content = tiff_of_12_bits(np.round(RAMP / 255 * 4095).astype(np.uint16))
    assert (decode(io.BytesIO(content)) - torch.from_numpy(RAMP).expand(3, 8, 8)).abs().max() <= 1


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "I;16", "GIF"])
def test_what_is_transparent_is_white_and_a_gif_is_its_first_frame(mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.paste((0, 0, 200, 255), (0, 0, 2, 4))
    if mode == "GIF":
        content = encoded(image, "GIF", save_all=True, append_images=[Image.new("RGBA", (4, 4), "red")])
    else:
        options = {"P": {"transparency": 1}, "I;16": {"transparency": 40_000}}.get(mode, {})
        palette = Image.fromarray(np.array([[0, 0, 1, 1]] * 4, np.uint8), "P")
        palette.putpalette([0, 0, 200, 0, 0, 0])
        wide = Image.fromarray(np.array([[0, 0, 40_000, 40_000]] * 4, np.uint16))
        made = {"P": palette, "I;16": wide}.get(mode) or image.convert(mode)
        content = encoded(made, "TIFF" if mode == "PA" else "PNG", **options)
    read = decode(io.BytesIO(content))
    assert (read[:, :, 2:] == 255).all() and read[:2, :, :2].max() < 60


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (array((RAMP - 1).astype(np.float32), "TIFF"), r"floats from -1 to 254"),
        (array(np.full((4, 4), np.nan, np.float32), "TIFF"), r"floats from nan to nan"),
        (array((RAMP * 1e6).astype(np.int32), "TIFF"), r"32-bit integers, whose range is not known"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n", r"is broken \(Unid.* or none of JPEG, PNG"),
        (b"no picture", r"is broken \(UnidentifiedImageError"),
    ],
    ids=["floats", "nan", "integers", "a program in PostScript", "text"],
)
def test_what_cannot_be_read_right_is_broken(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "odd.tif").write_bytes(content)
    with pytest.raises(BrokenImage, match=reason):
        ImageFiles(tmp_path, ["odd.tif"], [0], ["a"]).read(0)


@pytest.mark.parametrize(("mode", "kind"), [("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG")])
def test_whatever_the_colours_an_image_has_three_channels(mode: str, kind: str) -> None:
    read = decode(io.BytesIO(encoded(Image.new("RGB", (20, 20), (250, 250, 250)).convert(mode), kind)))
    assert read.shape == (3, 20, 20) and read.double().mean() == pytest.approx(250, abs=3)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])  # Pillow turns the second by itself
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_once_as_its_exif_data_say(orientation: int, kind: str) -> None:
    squares = np.array([[0, 90], [180, 255], [30, 200]], np.uint8)
    upright = Image.fromarray(np.kron(squares, np.ones((16, 16), np.uint8)))
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's number of the turn that the orientation undoes
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(turns[orientation]))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    read = decode(io.BytesIO(encoded(stored, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))))
    assert (read[0].int() - torch.from_numpy(np.array(upright)).int()).abs().max() < 20


def test_other_files_are_told_each_time_and_counted(own_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("notes.txt", "more.TXT", "photo.heic", "README"):
        (own_folder / "train" / "n00000001" / name).touch()
    for _ in range(2):
        caplog.clear()
        source = opened(own_folder)
        assert "4 files are left out, no images: n00000001/README, " in caplog.text
        assert sum(len(batch.micro_batches[0][1][0]) for batch in source.evaluation(1)) == 6
