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

from ..disk import explain, locked, open_for_writing, open_regular, whole_file, writing
from ..errors import ConfigurationError
from .source import Report, no_report

T = TypeVar("T")


def writing_cache(cache: Path) -> AbstractContextManager[None]:
    """Returns a context in which an OSError of the cache names its file, the reason, and what to do."""
    return writing(cache, "set data.cache_dir or GPIPE_CACHE to a folder with room", chosen=True)


def made(path: Path, make: Callable[[Path], None], read: Callable[[Path], T], report: Report = no_report) -> T:
    """Returns what `read` finds in a file, which `make(draft)` makes first unless it is there whole."""
    with suppress(Exception):  # a damaged file raises errors of a dozen types
        return read(path)
    with sole_maker(path, report):
        with suppress(Exception):  # another process has made it meanwhile
            return read(path)
        with whole_file(path) as draft:
            make(draft)
    return read(path)


def remove(path: Path) -> None:
    """Removes a file, a folder or a link, but not the file that the link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def sole_maker(path: Path, report: Report) -> Iterator[None]:
    """Holds the lock of a path at which something is to be made; the system releases it when this process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open_for_writing(path.with_name(f".{path.name}.lock"))
    try:
        if not locked(lock):
            report(f"data: waiting for another process that prepares {path.name}", 0, 0)
            locked(lock, wait=True)
        yield
    finally:
        os.close(lock)


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Writes an array to a file."""
    with whole_file(path) as draft:
        np.save(draft, array)


class GrowingArray:
    """Writes an array of one dimension to a .npy file, one part after the other.

    Attributes:
        size: numbers written so far.
    """

    def __init__(self, path: Path, kind: npt.DTypeLike) -> None:
        self.size, self._kind, self._file = 0, np.dtype(kind), path.open("wb")
        self._write_header()

    def append(self, numbers: npt.NDArray[Any]) -> None:
        """Writes further numbers."""
        self._file.write(np.ascontiguousarray(numbers, self._kind).data)
        self.size += len(numbers)

    def close(self) -> None:
        """Writes the length into the file's header, for which numpy leaves room."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        about = {"descr": np.lib.format.dtype_to_descr(self._kind), "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, about)


def open_array(path: Path) -> npt.NDArray[Any]:
    """Returns the integers in a file, mapped into memory; raises ConfigurationError for a damaged file."""
    try:
        os.close(open_regular(path))  # numpy would wait for a pipe
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        if array.dtype.kind not in "iu":
            raise ValueError(f"it holds {array.dtype}")
    except Exception as error:  # of a dozen types
        if explain(error):
            raise
        raise damaged(path, error) from error
    return array


def damaged(path: Path, error: object) -> ConfigurationError:
    """Returns the refusal of a damaged file of a prepared corpus."""
    return ConfigurationError(f"{path} is damaged ({error}): delete its corpus, which is then made anew")
