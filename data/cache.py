"""Keeps what was computed in files and folders, each of which is there whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..disk import writing
from .source import Report, no_report


def cache_folder(cache_dir: str | None) -> Path:
    """Returns `cache_dir`, or `$GPIPE_CACHE`, or `~/.cache/gpipe`."""
    return Path(cache_dir or os.environ.get("GPIPE_CACHE") or "~/.cache/gpipe").expanduser()


def writing_cache(cache: Path) -> AbstractContextManager[None]:
    """Returns a context in which an OSError of the cache becomes a `DiskError`: its file, the reason, what to do."""
    return writing(cache, "set data.cache_dir or GPIPE_CACHE to a folder with room")


def made(path: Path, make: Callable[[Path], None], report: Report = no_report) -> Path:
    """Returns a file or folder, which `make(draft)` makes first unless it is there; one process at a time.

    A draft that a killed process has left is there for the next one.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            _lock(lock.fileno(), path.name, report)
            if not path.exists():
                with whole_file(path) as draft:
                    make(draft)
    return path


def made_json(path: Path, make: Callable[[], Any]) -> Any:
    """Returns the JSON value in a file, which `make` makes first unless it is there."""
    if not path.exists():
        text = json.dumps(make(), ensure_ascii=False)
        with whole_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Writes an array to a file."""
    with whole_file(path) as draft:
        np.save(draft, array)


@lru_cache(maxsize=4_096)  # Linux allows a process 65,530 maps
def mapped_array(path: Path) -> npt.NDArray[Any]:
    """Returns the array in a file, mapped into memory."""
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    return array


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a draft's path; the draft becomes `path` when the block has ended, so that no reader sees half a file."""
    draft = path.with_name(f".partial-{path.name}")  # numpy wants its ending
    yield draft
    draft.replace(path)


def _lock(file: int, name: str, report: Report) -> None:
    """Waits until no other process holds the file's lock, which ends with the process or the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report(f"data: waiting for another process that prepares {name}", 0, 0)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks, where two preparations at once would disturb each other
        report(f"data: the file system of {name} has no locks: prepare one run at a time", 0, 0)
