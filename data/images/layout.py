"""Finds the folders of images under `data.root`, sorted into splits or not. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from ..tree import in_short, visible_entries

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")


def has_suffix(name: str) -> bool:
    """Returns True for a file name that ends as an image's."""
    return name.lower().endswith(SUFFIXES)


def folders_in(folder: Path) -> list[Path]:
    """Returns the visible folders in a folder, by name; none if it is not there."""
    return [Path(entry.path) for entry in visible_entries(folder) if entry.is_dir()] if folder.is_dir() else []


def split_root(root: Path, split: str) -> Path:
    """Returns the folder that holds the splits or the classes: `root`, or one below it where `root` holds only that.

    Archives often unpack to one folder in another.
    """
    while not (root / split).is_dir() and len(found := folders_in(root)) == 1 and folders_in(found[0]):
        if any(entry.name.lower().endswith((".tar", *SUFFIXES)) for entry in visible_entries(root)):
            break
        root = found[0]
    return root


def class_folder(root: Path, split: str) -> Path:
    """Returns the folder whose folders are the classes of the training images."""
    place = split_root(root, split)
    return place / split if (place / split).is_dir() else place


def unsplit(root: Path, splits: Sequence[str]) -> str | None:
    """Returns a line that says what to type if `root` holds class folders in place of splits; else None."""
    place = split_root(root, splits[0])
    classes = [folder for folder in folders_in(place) if any(has_suffix(e.name) for e in visible_entries(folder))]
    if (place / splits[0]).is_dir() or not classes:
        return None
    names = in_short([folder.name for folder in classes])
    return (
        f"data.root={place} has no folder '{splits[0]}', but folders of images: {names}. If these are the classes, "
        "data.held_out=0.1 evaluates on a tenth of their images; else name the splits by data.folders=[…,…]"
    )
