"""Measures how many images a second one core reads, decodes and transforms, with the loader that training uses.

Writes JPEG files of ImageNet's usual size, 500×375 pixels and some 110 KB, with the spectrum of photographs;
reads them as `data=imagenet`, `data=imagenet data.image_size=299` and a transfer data set do. Processor time counts, so
that other work on the machine matters little; a loader process computes with one thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from PIL import Image

from benchmarks.common import Row, parser, report
from gpipe_cli.data.images.source import ImageSource
from gpipe_cli.data.source import no_report

DIFFERENT = 24  # images; the others are their copies
WIDTH, HEIGHT, QUALITY = 500, 375, 90
KINDS = {"ImageNet, 480": ("imagenet", 480), "ImageNet, 299": ("imagenet", 299), "transfer, 480": ("food101", 480)}


def photograph(draw: np.random.Generator) -> Image.Image:
    """Returns an image of noise whose amplitude falls with the frequency, as in photographs."""
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None, :])
    frequency[0, 0] = 1 / WIDTH
    common, *channels = (
        np.fft.irfft2(np.fft.rfft2(draw.normal(size=(HEIGHT, WIDTH))) / frequency, (HEIGHT, WIDTH)) for _ in range(4)
    )
    mixed = np.stack([common + 0.3 * channel for channel in channels], -1)
    return Image.fromarray(np.clip(128 + 55 * mixed / mixed.std(), 0, 255).astype(np.uint8))


def write(root: Path, count: int) -> float:
    """Writes a training and an evaluation folder of one class; returns the mean size of a file in KB."""
    draw, files = np.random.default_rng(0), list[bytes]()
    for number in range(DIFFERENT):
        path = root / f"{number}.jpg"
        photograph(draw).save(path, quality=QUALITY)
        files.append(path.read_bytes())
        path.unlink()
    for folder, images in (("train", count), ("val", 1)):
        (root / folder / "a").mkdir(parents=True)
        for number in range(images):
            (root / folder / "a" / f"{number}.jpg").write_bytes(files[number % DIFFERENT])
    return sum(map(len, files)) / len(files) / 1000


def source(root: Path, data: str, size: int, count: int) -> ImageSource:
    """Returns a source with the transforms of `data=…` over the folder."""
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        section: Any = OmegaConf.to_container(compose("train", [f"data={data}"]).data, resolve=False)
    changed: dict[str, Any] = {
        "dataset": "image_folder",
        "root": str(root),
        "images": None,
        "classes": 1,
        "workers": 0,
        "seed": 0,
    }
    changed |= {"image_size": size, "batch_size": count, "folders": ["train", "val"], "cache_dir": str(root / "cache")}
    made = ImageSource(**{key: value for key, value in {**section, **changed}.items() if key != "_target_"})
    made.prepare(no_report)
    return made


def measure(root: Path, kilobytes: float, count: int) -> Iterator[Row]:
    for name, (data, size) in KINDS.items():
        batches = source(root, data, size, count).train(None, 1, 0, 1)
        next(batches)  # imports what it needs
        began = time.process_time()
        read = sum(len(batch.micro_batches[0][1][0]) for batch in islice(batches, 1))
        seconds = (time.process_time() - began) / read
        yield {"data": name, "KB": kilobytes, "images": read, "ms": 1e3 * seconds, "images/s and core": 1 / seconds}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--images", type=int, default=400, help="images that are timed (default: 400)")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    count = 16 if arguments.quick else arguments.images
    columns = {"data": "", "KB": ".0f", "images": "d", "ms": ".1f", "images/s and core": ".0f"}
    with tempfile.TemporaryDirectory(prefix="images-") as folder:
        kilobytes = write(Path(folder), count)
        report(columns, measure(Path(folder), kilobytes, count), arguments.output)


if __name__ == "__main__":
    main()
