"""Prepares text in the cache, in several processes, and opens it for a source."""

import hashlib
import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import sentencepiece

from ..cpu import usable_cores
from ..disk import DRAFT, NotRegular, cache_folder, whole_file, write_whole
from ..json_files import DamagedJson, read_json
from ..parent import die_with_parent
from .cache import remove, sole_maker, writing_cache
from .defects import DEFECTS, Defects
from .source import Report, no_report
from .vocabulary import FILES as VOCABULARIES
from .vocabulary import VocabularySource, smaller_notice

WORK = "work"  # folder of the intermediate files, in a folder that is being made
FILES = "files.json"  # the size of each other file of a store, in bytes; earlier releases wrote none
SMALL_BYTES = 4 * 2**20  # text that one process prepares before others have started

RunAll = Callable[..., Iterator[Any]]
"""Yields `function(*job)` of each job, in order."""


def prepared_folder(
    cache_dir: str | None, name: str, make: Callable[[Path], None], report: Report, description: type[Any]
) -> Path:
    """Returns a folder of the cache, and makes it first if it is not there, or one of its files is damaged.

    Args:
        make: fills the draft of the folder; intermediate files lie in its folder `WORK`.
        description: what its store.json holds.

    Raises:
        DiskError: the cache cannot be written.
    """
    cache = cache_folder(cache_dir)
    path = cache / name
    with writing_cache(cache):
        if not _is_whole(path, description, report):
            with sole_maker(path, report):
                if not _is_whole(path, description, no_report):  # another process may have made it meanwhile
                    draft = path.with_name(f"{DRAFT}{path.name}")
                    for left in (path, draft):  # by a process that was killed
                        remove(left)
                    try:
                        draft.mkdir()
                        (draft / WORK).mkdir()
                        make(draft)
                        remove(draft / WORK)
                        files = (file for file in draft.rglob("*") if file.is_file())
                        sizes = {str(file.relative_to(draft)): file.stat().st_size for file in files}
                        write_whole(draft / FILES, json.dumps(sizes))
                        draft.rename(path)
                    finally:
                        remove(draft)
    return path


def _is_whole(folder: Path, description: type[Any], report: Report) -> bool:
    """Returns whether a folder is there with JSON that can be read and files of full size; reports a damaged one."""
    try:
        read_json(folder / "store.json", description)
        Defects.read(folder)
        sizes = read_json(folder / FILES, dict[str, int]) if (folder / FILES).exists() else {}
        for file, size in ((folder / name, size) for name, size in sizes.items()):
            if not (file.is_file() and file.stat().st_size == size and os.access(file, os.R_OK)):
                raise DamagedJson(f"{file} is damaged: it is no readable file of {size:,} bytes")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (DamagedJson, NotRegular, PermissionError) as error:
        report(f"{error}: it is made anew", 0, 0)
        return False
    return True


def digest_of(*content: object) -> str:
    """Returns a digest of all that decides the bytes of a store, JSON values; by it the store is found again."""
    text = json.dumps([*content, sentencepiece.__version__])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def stat_of(file: Path) -> list[object]:
    """Returns a file's path, size and time of modification, as JSON values."""
    found = file.stat()
    return [str(file.resolve()), found.st_size, found.st_mtime_ns]


class PreparedSource(VocabularySource):
    """Reads a prepared text; `prepare` calls `_use`."""

    _store: Any  # a `store.Store` or `text.source.TextStore`

    def _use(self, store: Any) -> None:
        self._store, self.prepared_defects = store, Defects.read(store.folder)[0].totals()
        self.source_vocabulary, self.target_vocabulary = store.source_vocabulary, store.target_vocabulary

    def _warn(self, strict: bool, used: str, vocabularies: Mapping[str, tuple[int, Sized]]) -> None:
        """Warns of lines left out when the store was made, and of vocabularies smaller than asked for.

        Args:
            strict: see `Defects.refuse`.
            used: what was not left out, in words; {lines} becomes the number of lines.
            vocabularies: the pieces asked for, and the vocabulary, under each key of `data`.

        Raises:
            ConfigurationError: it was made with defects that are to be refused now.
        """
        log = logging.getLogger(type(self).__module__)  # the console shows those of the source's package
        defects, content = Defects.read(self._store.folder)
        defects.refuse(strict)
        if found := defects.in_words():
            which = self._store.folder / DEFECTS
            log.warning("%s: %s; which ones: %s", used.format(lines=f"{content.get('lines', 0):,}"), found, which)
        for key, (wanted, vocabulary) in vocabularies.items():
            if notice := smaller_notice(key, wanted, vocabulary):
                log.warning("%s", notice)

    def keep_vocabularies(self, folder: Path) -> None:
        """Copies the vocabularies to a folder, where `vocabulary` reads them without the text; its other files go."""
        folder.mkdir(exist_ok=True)
        for name in VOCABULARIES:
            if (self._store.folder / name).exists():
                with whole_file(folder / name) as draft:
                    shutil.copyfile(self._store.folder / name, draft)
            else:
                (folder / name).unlink(missing_ok=True)

    def fingerprint(self) -> str:
        """Returns that of the text that is trained on, which the order of reading does not change."""
        return str(self._store.fingerprint())


# -- processes ---------------------------------------------------------------------------------------------------------


def worker_count(files: Sequence[Path], workers: int | None) -> int:
    """Returns the number of processes that prepare these files: as many as asked for, else one per core."""
    return workers or (1 if sum(file.stat().st_size for file in files) < SMALL_BYTES else usable_cores())


@contextmanager
def in_processes(count: int) -> Iterator[RunAll]:
    """Yields a function that runs jobs in `count` processes, in this one if it is 1; results keep the jobs' order.

    They are new interpreters, not forks, because the caller may hold a GPU or threads. They end with this process.
    """
    if count == 1:
        yield starmap
        return
    pool = ProcessPoolExecutor(count, get_context("spawn"), die_with_parent, (os.getpid(),))
    try:
        yield partial(_run_all, pool, 2 * count)
    finally:
        pool.shutdown(cancel_futures=True)


def _run_all(
    pool: ProcessPoolExecutor, most: int, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
) -> Iterator[Any]:
    """Yields the results; fewer than `most` jobs are running or not yet taken."""
    waiting: deque[Future[Any]] = deque()
    for job in jobs:
        waiting.append(pool.submit(function, *job))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
