"""Makes a prepared text in the cache, and opens it for a source."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol

import sentencepiece

from ..cpu import usable_cores
from .cache import cache_folder, made, writing_cache
from .defects import defect_notice, defects_of
from .kept_vocabularies import keep_vocabularies
from .source import Report, Source
from .vocabulary import smaller_notice

WORK = "work"  # folder of the intermediate files, in a folder that is being made
SMALL_BYTES = 4 * 2**20  # text that one process prepares before others have started


def prepared_folder(cache_dir: str | None, name: str, make: Callable[[Path], None], report: Report) -> Path:
    """Returns a folder of the cache, and makes it first if it is not there.

    Args:
        make: fills the draft of the folder, where a process that was killed may have left files.

    Raises:
        DiskError: the cache cannot be written.
    """

    def fill(draft: Path) -> None:
        draft.mkdir(exist_ok=True)
        make(draft)

    cache = cache_folder(cache_dir)
    with writing_cache(cache):
        folder = made(cache / name, fill, report)
    shutil.rmtree(folder / WORK, ignore_errors=True)
    return folder


class PreparedText(Protocol):
    """Holds a prepared text: a `store.Store` or a `text.store.TextStore`."""

    folder: Path
    source_vocabulary: Any  # of `Vocabulary` or `TokenizerFile`
    target_vocabulary: Any

    def fingerprint(self) -> str: ...


class PreparedSource(Source):
    """Reads a prepared text; `prepare` calls `_use`."""

    _store: PreparedText

    def _use(self, store: PreparedText) -> None:
        self._store, self.prepared_defects = store, defects_of(store.folder)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the source ids of each text."""
        ids: list[list[int]] = self._store.source_vocabulary.encode(texts)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of target ids, up to the first end token."""
        return str(self._store.target_vocabulary.decode(ids))

    def keep_vocabularies(self, folder: Path) -> None:
        """Copies what ids mean to a folder, from which `kept_vocabularies` reads it without the text."""
        keep_vocabularies(self._store.folder, folder)

    def fingerprint(self) -> str:
        """Returns that of the text that is trained on, which the order of reading does not change."""
        return self._store.fingerprint()


def warn_of(
    log: logging.Logger,
    store: Path,
    policy: Mapping[str, str],
    used: str,
    vocabularies: Mapping[str, tuple[int, Sized]],
) -> None:
    """Warns of what was left out when a store was made, and of vocabularies smaller than asked for.

    Args:
        log: whose warnings the console shows.
        policy, used: see `defect_notice`.
        vocabularies: by their key under `data`: the pieces asked for, and the vocabulary.

    Raises:
        ConfigurationError: it was made with defects dropped that are to be refused now.
    """
    notices = [defect_notice(store, policy, used)]
    notices += [smaller_notice(key, *of_key) for key, of_key in vocabularies.items()]
    for notice in filter(None, notices):
        log.warning("%s", notice)


def digest_of(*content: object) -> str:
    """Returns a digest of all that decides the bytes of a store, JSON values; by it the store is found again."""
    text = json.dumps([*content, sentencepiece.__version__])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def stat_of(file: Path) -> list[object]:
    """Returns a file's path, size and time of modification, as JSON values."""
    found = file.stat()
    return [str(file.resolve()), found.st_size, found.st_mtime_ns]


def worker_count(files: Sequence[Path], workers: int | None) -> int:
    """Returns the number of processes that prepare these files: as many as asked for, else one per core."""
    return workers or (1 if sum(file.stat().st_size for file in files) < SMALL_BYTES else usable_cores())
