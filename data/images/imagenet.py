"""Finds ImageNet (ILSVRC 2012) as it is downloaded: its tars, Kaggle's tree, and a flat val with its label file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ConfigurationError
from ..source import Report
from .files import FlatImageFiles, ImageFiles
from .folders import images_in, is_flat, read_folder, some_of, warn_of
from .tars import NEEDS as SHARDS
from .tars import read_tars, tars_of

KAGGLE_TREE = "ILSVRC/Data/CLS-LOC"  # holds train and val in Kaggle's archive
KAGGLE_LABELS = "LOC_val_solution.csv"
DEVKIT = "ILSVRC2012_devkit_t12/data"
DEVKIT_LABELS = "ILSVRC2012_validation_ground_truth.txt"
DEVKIT_CLASSES = ("map_clsloc.txt", "meta.mat")  # a wnid for each number: of later devkits; of 2012, needs scipy
LABEL_FILES = (KAGGLE_LABELS, DEVKIT_LABELS, f"{DEVKIT}/{DEVKIT_LABELS}")
NEEDS = (
    f"train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, 1,000 folders in each, or both in {KAGGLE_TREE}/, or "
    "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar. For the latter, or a flat val (val/ILSVRC2012_val_*.JPEG), "
    f"it must hold the labels, one of {', '.join(LABEL_FILES)}. Or {SHARDS}. Where from: "
    "https://image-net.org/download-images (an account is needed)"
)


class Label(NamedTuple):
    """Holds what a label file says of one image, and in which line (from 1)."""

    wnid: str
    line: int


def open_imagenet(root: Path, folders: Sequence[str], report: Report) -> tuple[ImageFiles, ImageFiles]:
    """Returns the training and the evaluation images: the same examples in the same order from every layout but shards.

    Raises:
        ConfigurationError: something is missing or does not fit; the message names it.
    """
    tree = root / KAGGLE_TREE
    base = root if (root / folders[0]).is_dir() or not tree.is_dir() else tree
    (train_tars, val_tars), val = tars_of(base, folders), base / folders[1]
    train: ImageFiles = read_tars(train_tars, report) if train_tars else read_folder(base / folders[0], report)
    classes = train.class_names
    if val_tars:
        return train, read_tars(val_tars, report, classes, lambda names: _wnids_of(names, val_tars[0], root, classes))
    if not is_flat(val):
        return train, read_folder(val, report, classes)
    names, others = images_in(val)
    warn_of(val, others)
    wnids = _wnids_of(names, val, root, classes)
    listed = sorted(f"{wnid}/{name}" for wnid, name in zip(wnids, names, strict=True))
    number = {wnid: label for label, wnid in enumerate(classes)}
    return train, FlatImageFiles(val, listed, [number[name.partition("/")[0]] for name in listed], classes, len(others))


def _wnids_of(names: Sequence[str], val: Path, root: Path, classes: Sequence[str]) -> list[str]:
    """Returns the class of each image of a folder or tar that does not tell it, from the label file."""
    file, labels = _read_labels(root, val)
    if missing := [name for name in names if Path(name).stem not in labels]:
        raise ConfigurationError(f"{file} has no line for images of {val}: {some_of(missing)}")
    of_images, known = [labels[Path(name).stem] for name in names], set(classes)
    if strange := [label for label in of_images if label.wnid not in known]:
        first = min(strange, key=lambda label: label.line)
        raise ConfigurationError(
            f"{file}, line {first.line}: class '{first.wnid}' has no training images ({len(strange)} such lines)"
        )
    return [label.wnid for label in of_images]


def _read_labels(root: Path, val: Path) -> tuple[Path, Mapping[str, Label]]:
    """Returns the label file that is there, and what it says of each image, by the image's name without ending."""
    file = next((root / name for name in LABEL_FILES if (root / name).is_file()), None)
    if file is None:
        raise ConfigurationError(
            f"{val} does not tell its classes: data.root={root} must have its labels, one of {', '.join(LABEL_FILES)}"
        )
    lines = enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    rows = _rows_of_kaggle(file, lines) if file.name == KAGGLE_LABELS else _rows_of_devkit(file, lines)
    labels = dict[str, Label]()
    for name, label in rows:
        if name in labels:
            raise ConfigurationError(f"{file}, line {label.line}: {name} is also in line {labels[name].line}")
        labels[name] = label
    return file, labels


def _rows_of_kaggle(file: Path, lines: Iterable[tuple[int, str]]) -> Iterable[tuple[str, Label]]:
    """Yields image and label of lines like `ILSVRC2012_val_00048981,n03995372 85 1 499 272`: a class, then its box."""
    for line, text in lines:
        name, _, boxes = text.partition(",")
        if name == "ImageId":
            continue
        if not name or not boxes.split():
            raise ConfigurationError(f"{file}, line {line}: '{text[:80]}' is not an image, a comma and its class")
        yield name, Label(boxes.split()[0], line)


def _rows_of_devkit(file: Path, lines: Iterable[tuple[int, str]]) -> Iterable[tuple[str, Label]]:
    """Yields image and label of lines that hold one ILSVRC2012_ID each; line 1 is of image 1."""
    wnids = _wnids(file.parent)
    for line, text in lines:
        if text.strip() not in wnids:
            raise ConfigurationError(f"{file}, line {line}: '{text[:80]}' is not the number of a class (ILSVRC2012_ID)")
        yield f"ILSVRC2012_val_{line:08}", Label(wnids[text.strip()], line)


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
