"""Prepares text in several processes, and opens it for a source."""

import hashlib
import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import starmap
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import sentencepiece

from ..cpu import usable_cores
from ..disk import whole_file
from ..parent import die_with_parent
from .source import Source
from .vocabulary import EOS, AnyVocabulary, warn_if_smaller
from .vocabulary import FILES as VOCABULARIES

SMALL_BYTES = 4 * 2**20  # text that one process prepares before others have started

RunAll = Callable[..., Iterator[Any]]
"""Yields `function(*job)` of each job, in order."""


def digest_of(*content: object) -> str:
    """Returns a digest of all that decides the bytes of a store (JSON values), by which the store is found again."""
    text = json.dumps([*content, sentencepiece.__version__])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def stat_of(file: Path) -> list[object]:
    """Returns a file's path, size and time of modification, as JSON values."""
    found = file.stat()
    return [str(file.resolve()), found.st_size, found.st_mtime_ns]


class PreparedSource(Source):
    """Reads a prepared text. `prepare` of a subclass opens its store and calls `_use`.

    Attributes:
        reads_ends: True if the model reads an end token after each source text.
    """

    source_vocabulary: AnyVocabulary
    target_vocabulary: AnyVocabulary
    reads_ends = False
    _store: Any  # a `store.Store` or `text.source.TextStore`
    _folder: Path  # of the vocabularies

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the source ids of each text, as the model reads them."""
        ends = [EOS] if self.reads_ends else []
        return [[*ids, *ends] for ids in self.source_vocabulary.encode(texts)]

    def decode(self, ids: Sequence[int], after: int = 0) -> str:
        """Returns the text of target ids, up to the first end token from `after` on."""
        return self.target_vocabulary.decode(ids, after)

    def _use(self, store: Any) -> None:
        """Takes the vocabularies and the counts of defects from an opened store."""
        self._store, self._folder, self.prepared_defects = store, store.folder, store.defects.counts
        self.source_vocabulary, self.target_vocabulary = store.source_vocabulary, store.target_vocabulary

    def _warn(self, used: str, vocabularies: Mapping[str, tuple[int, Sized]]) -> None:
        """Warns of lines left out when the store was made, and of vocabularies smaller than asked for.

        Args:
            used: the beginning of the message, which says how much was not left out.
            vocabularies: key of `data` -> (pieces asked for, vocabulary).
        """
        log = logging.getLogger(type(self).__module__)  # the console shows those of the source's package
        if found := self._store.defects.in_words():
            log.warning("%s: %s", used, found)
        for key, (wanted, vocabulary) in vocabularies.items():
            warn_if_smaller(key, wanted, vocabulary, log)

    def keep_vocabularies(self, folder: Path) -> None:
        """Copies the vocabularies to a folder, so that they can be read without the text.

        Vocabulary files of an earlier run are removed from it.
        """
        folder.mkdir(exist_ok=True)
        for name in VOCABULARIES:
            if (self._folder / name).exists():
                with whole_file(folder / name) as draft:
                    shutil.copyfile(self._folder / name, draft)
            else:
                (folder / name).unlink(missing_ok=True)

    def fingerprint(self) -> str:
        """Returns the fingerprint of the text that is trained on; the order of reading does not change it."""
        return str(self._store.fingerprint())


# -- processes ---------------------------------------------------------------------------------------------------------


def worker_count(files: Iterable[Path], workers: int | None) -> int:
    """Returns the number of processes that prepare these files: as many as asked for, else one per core."""
    return workers or (1 if sum(file.stat().st_size for file in files) < SMALL_BYTES else usable_cores())


@contextmanager
def in_processes(count: int) -> Iterator[RunAll]:
    """Yields a function that runs jobs in `count` processes (1: in this one) and yields results in the jobs' order.

    They are new interpreters, not forks, because the caller may hold a GPU or threads. They end with this process.
    """
    if count == 1:
        yield starmap
        return
    pool = ProcessPoolExecutor(count, get_context("spawn"), die_with_parent, (os.getpid(),))

    def run_all(function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        waiting: deque[Future[Any]] = deque()  # their arguments and results are in memory: two for each process
        for job in jobs:
            waiting.append(pool.submit(function, *job))
            if len(waiting) >= 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        yield run_all
    finally:
        pool.shutdown(cancel_futures=True)
