"""Writes ImageNet in miniature, in each of the layouts in which it is downloaded and unpacked."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import tiny_images
from tiny_images import write_tar

WNIDS = ("n01440764", "n01443537", "n01484850")
NUMBERS = {"n01440764": 449, "n01443537": 450, "n01484850": 5}  # ILSVRC2012_ID: in another order than the wnids
VAL = (2, 0, 1, 1, 0, 2)  # class of each evaluation image, in the order of their names
DEVKIT = "ILSVRC2012_devkit_t12/data"
TRUTH, KAGGLE = "ILSVRC2012_validation_ground_truth.txt", "LOC_val_solution.csv"


def name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08}"


def write_images(base: Path, flat: bool = True) -> None:
    """Writes train in class folders, and val flat or in class folders."""
    for label, wnid in enumerate(WNIDS):
        for number in range(4):
            tiny_images.save_image(base / "train" / wnid / f"{wnid}_{number}.JPEG", label, number)
    for number, label in enumerate(VAL, 1):
        folder = base / "val" if flat else base / "val" / WNIDS[label]
        tiny_images.save_image(folder / f"{name(number)}.JPEG", label, number)


def write_lines(file: Path, lines: Sequence[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))


def kaggle_lines() -> list[str]:
    rows = [f"{name(number)},{WNIDS[label]} 85 1 499 272 " for number, label in enumerate(VAL, 1)]
    return ["ImageId,PredictionString", *reversed(rows)]  # in any order


def write_devkit(folder: Path) -> None:
    write_lines(folder / TRUTH, [str(NUMBERS[WNIDS[label]]) for label in VAL])
    write_lines(folder / "map_clsloc.txt", [f"{wnid} {number} some_name" for wnid, number in NUMBERS.items()])


def class_folders(root: Path) -> None:
    write_images(root, flat=False)


def kaggle(root: Path) -> None:
    write_images(root / "ILSVRC/Data/CLS-LOC")
    tiny_images.save_image(root / "ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG", 0)
    write_lines(root / KAGGLE, kaggle_lines())


def flat_with_kaggle_labels(root: Path) -> None:
    write_images(root)
    write_lines(root / KAGGLE, kaggle_lines())


def flat_with_devkit(root: Path) -> None:
    write_images(root)
    write_devkit(root / DEVKIT)


def flat_with_the_devkit_s_files(root: Path) -> None:
    write_images(root)
    write_devkit(root)


def official_tars(root: Path) -> None:
    """Writes a tar with one tar for each class, a flat one, and what else lies beside them."""
    class_folders(root / "unpacked")
    (root / "class_tars").mkdir()
    for wnid in reversed(WNIDS):  # in any order
        write_tar(root / "class_tars" / f"{wnid}.tar", sorted((root / "unpacked/train" / wnid).iterdir(), reverse=True))
    write_tar(root / "ILSVRC2012_img_train.tar", sorted((root / "class_tars").iterdir(), reverse=True))
    write_tar(root / "ILSVRC2012_img_val.tar", sorted((root / "unpacked/val").glob("*/*"), reverse=True))
    write_tar(root / "ILSVRC2012_img_train_t3.tar", [])
    write_devkit(root / DEVKIT)
    shutil.rmtree(root / "unpacked")
    shutil.rmtree(root / "class_tars")


def train_in_folders_and_val_in_a_tar(root: Path) -> None:
    official_tars(root)
    write_images(root)
    shutil.rmtree(root / "val")
    write_lines(root / KAGGLE, kaggle_lines())


LAYOUTS: list[Callable[[Path], None]] = [
    kaggle, flat_with_kaggle_labels, flat_with_devkit, flat_with_the_devkit_s_files, official_tars,
    train_in_folders_and_val_in_a_tar,
]  # fmt: skip
