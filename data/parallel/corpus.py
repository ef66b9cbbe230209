"""Opens the store of a folder of parallel text, in the cache; makes it first if it is not there."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import sentencepiece

from ..defects import Defect, in_words, refuse
from ..prepared import prepared_folder, worker_count
from ..source import Report
from ..store import DEFECTS, FORMAT, Store
from ..vocabulary import smaller_notice
from .folders import PairFiles, find_pairs
from .preparation import ParallelText, Preparation

log = logging.getLogger(__name__)


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
    files = [file for pair in pairs for file in pair.files]

    def make(folder: Path) -> None:
        Preparation(text, pairs, policy, folder, worker_count(files, workers), report).run()

    store = Store(prepared_folder(cache_dir, f"parallel-{_digest(text, pairs)}", make, report))
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
