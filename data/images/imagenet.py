"""Finds ImageNet (ILSVRC 2012) as it is downloaded: its tars, Kaggle's tree, and a flat val with its label file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from .folders import some_of

KAGGLE_TREE = "ILSVRC/Data/CLS-LOC"  # holds train and val in Kaggle's archive
KAGGLE_LABELS = "LOC_val_solution.csv"
DEVKIT = "ILSVRC2012_devkit_t12/data"
DEVKIT_LABELS = "ILSVRC2012_validation_ground_truth.txt"
DEVKIT_CLASSES = ("map_clsloc.txt", "meta.mat")  # a wnid for each number: of later devkits; of 2012, needs scipy
LABEL_FILES = (KAGGLE_LABELS, DEVKIT_LABELS, f"{DEVKIT}/{DEVKIT_LABELS}")


def folder_of_splits(root: Path, train: str) -> Path:
    """Returns the folder that holds both splits: `root`, or the one in Kaggle's archive."""
    tree = root / KAGGLE_TREE
    return root if (root / train).is_dir() or not tree.is_dir() else tree


def wnids_of(root: Path, names: Sequence[str], val: Path) -> list[str]:
    """Returns the class of each image of a folder or tar that does not tell it, from the label file.

    Raises:
        ConfigurationError: there is no label file, or it lacks an image.
    """
    file = next((root / name for name in LABEL_FILES if (root / name).is_file()), None)
    if file is None:
        raise ConfigurationError(
            f"{val} does not tell its classes: data.root={root} must have its labels, one of {', '.join(LABEL_FILES)}"
        )
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if file.name == KAGGLE_LABELS:  # ILSVRC2012_val_00048981,n03995372 85 1 499 272: a class, then its box
        rows = [line.partition(",") for line in lines]
        labels = {name: boxes.split()[0] for name, _, boxes in rows if boxes.strip()}
    else:  # an ILSVRC2012_ID in each line; line 1 is of image 1
        wnids = _wnids(file.parent)
        numbered = [(f"ILSVRC2012_val_{line:08}", text.strip()) for line, text in enumerate(lines, 1)]
        labels = {name: wnids[number] for name, number in numbered if number in wnids}
    if missing := [name for name in names if Path(name).stem not in labels]:
        raise ConfigurationError(f"{file} has no class for images of {val}: {some_of(missing)}")
    return [labels[Path(name).stem] for name in names]


def _wnids(devkit: Path) -> dict[str, str]:
    """Returns the wnid of each ILSVRC2012_ID.

    Raises:
        ConfigurationError: no file of the devkit says it, or scipy is missing to read the one that does.
    """
    text, matlab = (devkit / name for name in DEVKIT_CLASSES)
    if text.is_file():
        rows = [line.split() for line in text.read_text(encoding="utf-8").splitlines()]
        return {row[1]: row[0] for row in rows if len(row) > 1}
    instead = f"put {text.name} of a later devkit beside it, or Kaggle's {KAGGLE_LABELS} into data.root"
    if not matlab.is_file():
        raise ConfigurationError(
            f"{devkit / DEVKIT_LABELS}: {matlab.name}, which says what its numbers mean, is not beside it: {instead}"
        )
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped] # large, and only for this
    except ImportError as error:
        raise ConfigurationError(f"{matlab} needs scipy: pip install '.[cars]', or {instead}") from error
    synsets: Any = loadmat(matlab, squeeze_me=True)["synsets"]
    return {str(int(number)): str(wnid) for number, wnid in zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)}
