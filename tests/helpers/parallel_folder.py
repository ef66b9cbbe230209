"""Writes small folders of parallel text in the supported layouts, made of sentences of the CLDR corpus."""

import bz2
import gzip
import lzma
from collections.abc import Sequence
from pathlib import Path

import zstandard

from gpipe_cli.data.cldr import pairs as cldr

PACKERS = {".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
SIZES = {"de": 300, "fi": 200, "sw": 120}


def pairs_of(code: str, count: int, split: str = "train") -> list[cldr.Pair]:
    if split == "train":
        return cldr.train_pairs(code, count, seed=0)
    return cldr.held_out_pairs(code, split, seed=0)[:count]


def write(path: Path, lines: Sequence[str]) -> None:
    """Writes lines, compressed as the ending of the name says, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(PACKERS.get(path.suffix, bytes)(data))


def opus(root: Path, sizes: dict[str, int] = SIZES) -> Path:
    """Writes xx-en/opus.xx-en-train.xx beside .en; Finnish in en-fi."""
    for code, size in sizes.items():
        name = f"en-{code}" if code == "fi" else f"{code}-en"
        _write_splits(root / name, f"opus.{name}-", code, size)
    return root


def plain(root: Path, code: str = "de", size: int = 300, dev: str = "valid") -> Path:
    """Writes train.xx beside train.en."""
    _write_splits(root, "", code, size, dev)
    return root


def _write_splits(folder: Path, prefix: str, code: str, size: int, dev: str = "dev") -> None:
    for split, name in (("train", "train"), ("dev", dev), ("test", "test")):
        pairs = pairs_of(code, size if split == "train" else 20, split)
        write(folder / f"{prefix}{name}.{code}", [pair.source for pair in pairs])
        write(folder / f"{prefix}{name}.en", [pair.target for pair in pairs])


def corpus(stem: Path, first: int, last: int, sides: tuple[str, str] = ("de", "en"), split: str = "train") -> None:
    """Writes STEM.de beside STEM.en: German pairs of a split from one number to another."""
    for column, side in enumerate(sides):
        lines = [pair[column] for pair in pairs_of("de", last, split)[first:]]
        write(stem.with_name(f"{stem.name}.{side}"), lines)
