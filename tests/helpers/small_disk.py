"""Mounts disks that are small, read-only or soon full; tests of them are skipped where that is not allowed."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mounts a file system in memory at a folder.

    Args:
        options: options of mount: "size=100k", "nr_inodes=3", "ro".
    """
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Writes a file that leaves no room beside it, and returns its path."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    return filler
