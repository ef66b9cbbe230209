"""Keeps computed results in files and folders, each of which is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..disk import DRAFT, cache_folder, locked, open_for_writing, whole_file, writing
from .source import Report, no_report

T = TypeVar("T")


def writing_cache(cache: Path) -> AbstractContextManager[None]:
    """Returns a context in which an OSError of the cache names its file, the reason, and what to do."""
    return writing(cache, "set data.cache_dir or GPIPE_CACHE to a folder with room", chosen=True)


def get_or_make(path: Path, make: Callable[[Path], None], read: Callable[[Path], T], report: Report = no_report) -> T:
    """Returns read(path). If the file is missing or damaged, one process makes it first by `make(draft)`."""
    with suppress(Exception):  # a damaged file raises errors of a dozen types
        return read(path)
    with sole_maker(path, report):
        with suppress(Exception):  # another process has made it meanwhile
            return read(path)
        with whole_file(path) as draft:
            make(draft)
    return read(path)


def made_folder(cache_dir: str | None, name: str, make: Callable[[Path], None], report: Report) -> Path:
    """Returns a folder of the cache. If it is not there, one process makes it first by `make(draft)`.

    Raises:
        DiskError: the cache cannot be written.
    """
    path = cache_folder(cache_dir) / name
    with writing_cache(path.parent):
        if path.exists():
            return path
        with sole_maker(path, report):
            if not path.exists():  # another process may have made it meanwhile
                draft = path.with_name(f"{DRAFT}{path.name}")
                shutil.rmtree(draft, ignore_errors=True)  # a killed process may have left one
                draft.mkdir()
                try:
                    make(draft)
                    draft.rename(path)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
    return path


@contextmanager
def sole_maker(path: Path, report: Report) -> Iterator[None]:
    """Holds the lock of a path at which something is to be made, within the context.

    Waits while another process has it. The system releases it when this process ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open_for_writing(path.with_name(f".{path.name}.lock"))
    try:
        if not locked(lock):
            report(f"data: waiting for another process that prepares {path.name}", 0, 0)
            locked(lock, wait=True)
        yield
    finally:
        os.close(lock)


def append(path: Path, numbers: npt.NDArray[Any]) -> None:
    """Writes numbers at the end of a file."""
    with path.open("ab") as file:
        file.write(np.ascontiguousarray(numbers).data)


def open_array(path: Path, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns the numbers in a file, mapped into memory."""
    return np.asarray(np.memmap(path, kind, "r")) if path.stat().st_size else np.empty(0, kind)
