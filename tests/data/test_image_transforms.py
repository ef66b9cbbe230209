"""Tests the transforms of images."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.data.images.transforms import GREY, central_crop, cut_out, shift_colours


def noise(height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_the_central_crop_keeps_the_middle_seven_eighths() -> None:
    image = noise(80, 160)
    assert torch.equal(central_crop(image, 0.875), image[:, 5:75, 10:150])


def test_brightness_moves_all_channels_alike_by_at_most_its_share() -> None:
    torch.manual_seed(0)
    image = torch.full((3, 2, 2), 128, dtype=torch.uint8)
    shifts = torch.stack([shift_colours(image, 0.125, 0.0)[:, 0, 0].int() - 128 for _ in range(300)])
    assert (shifts == shifts[:, :1]).all()
    assert (int(shifts.min()), int(shifts.max())) == (pytest.approx(-32, abs=1), pytest.approx(32, abs=1))


def test_chroma_moves_red_green_and_blue_as_cb_and_cr_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, dtype: torch.tensor([0.5, 1.0, 0.75], dtype=dtype))
    image = torch.full((3, 1, 1), 100, dtype=torch.uint8)  # draws: no brightness, Cb + 0.1, Cr + 0.05
    # 255 · (1.402 · 0.05, −0.344136 · 0.1 − 0.714136 · 0.05, 1.772 · 0.1) = 17.9, −17.9, 45.2
    assert shift_colours(image, 0.125, 0.1).flatten().tolist() == [118, 82, 145]


@pytest.mark.parametrize(
    ("centre", "rows", "columns"),
    [((8, 8), slice(6, 10), slice(6, 10)), ((0, 15), slice(0, 2), slice(13, 16))],
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
