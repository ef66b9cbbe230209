"""Opens the store of a folder of parallel text, in the cache; makes it first if it is not there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import sentencepiece

from ...cpu import usable_cores
from ..source import Report, cache_folder, writing_cache
from ..store import DEFECTS, FORMAT, Store
from ..vocabulary import smaller_notice
from .defects import Defect, in_words, refuse
from .folders import PairFiles, find_pairs
from .preparation import WORK, ParallelText, Preparation

log = logging.getLogger(__name__)

SMALL_BYTES = 4 * 2**20  # text that one process prepares before others have started


def open_parallel_store(
    text: ParallelText, policy: Mapping[str, str], cache_dir: str | None, workers: int | None, report: Report
) -> Store:
    """Returns the store of the text; makes it first if it is not in the cache.

    A store is found again by the names, sizes and modification times of its files, and by `text`.

    Args:
        policy: see `defects.check_policy`.
        workers: processes; None: one per core. The number changes no byte.

    Raises:
        ConfigurationError: files are missing, a defect is to be refused, or a vocabulary size does not fit the text.
    """
    pairs = find_pairs(text.root, text.languages, text.target)
    cache = cache_folder(cache_dir)
    folder = cache / f"parallel-{_digest(text, pairs)}"
    if not folder.is_dir():
        with writing_cache(cache):
            cache.mkdir(parents=True, exist_ok=True)
            lock = (cache / f".{folder.name}.lock").open("w")
        with writing_cache(cache), lock, _locked(lock.fileno(), folder.name, report):
            if not folder.is_dir():
                Preparation(text, pairs, policy, folder, _worker_count(pairs, workers), report).run()
    shutil.rmtree(folder / WORK, ignore_errors=True)
    store = Store(folder)
    _tell(store, text, policy)
    return store


def _digest(text: ParallelText, pairs: Sequence[PairFiles]) -> str:
    stats = [
        [pair.language, pair.split, str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
        for pair in pairs
        for file in pair.files
    ]
    content = [FORMAT, asdict(text), stats, sentencepiece.__version__]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


@contextmanager
def _locked(file: int, name: str, report: Report) -> Iterator[None]:
    """Allows one preparation at a time; the lock ends with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report(f"parallel text: waiting for another process that prepares {name}", 0, 0)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks, where two preparations at once would disturb each other
        log.warning("no locks on the file system of %s: prepare one run at a time", name)
    yield


def _worker_count(pairs: Sequence[PairFiles], workers: int | None) -> int:
    size = sum(file.stat().st_size for pair in pairs for file in pair.files)
    return workers or (1 if size < SMALL_BYTES else usable_cores())


def _tell(store: Store, text: ParallelText, policy: Mapping[str, str]) -> None:
    """Warns of what was left out when the store was made, and of vocabularies smaller than asked for.

    Raises:
        ConfigurationError: it was made with defects dropped that are to be refused now.
    """
    content = json.loads((store.folder / DEFECTS).read_text(encoding="utf-8"))
    refuse([Defect(**defect) for defect in content["defects"]], policy)
    if found := in_words(store.defects, policy):
        used = f"{sum(store.sizes.values()):,} of {content['lines']:,} training pairs are used"
        log.warning("parallel text: %s: %s; which ones: %s", used, found, store.folder / DEFECTS)
    wanted = text.vocabularies
    if wanted.shared:
        sides = [("vocabulary", wanted.source, store.source_vocabulary)]
    else:
        sides = [("source_vocabulary", wanted.source, store.source_vocabulary)]
        sides.append(("target_vocabulary", wanted.target, store.target_vocabulary))
    for key, size, vocabulary in sides:
        if notice := smaller_notice(key, size, vocabulary):
            log.warning("%s", notice)
