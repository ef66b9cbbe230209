"""Opens the store of a folder of parallel text, in the cache; makes it first if it is not there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ..defects import defect_notice
from ..prepared import digest_of, prepared_folder, stat_of, worker_count
from ..source import Report
from ..store import FORMAT, Store
from ..vocabulary import smaller_notice
from .folders import find_pairs
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

    stats = [[pair.language, pair.split, *stat_of(file)] for pair in pairs for file in pair.files]
    name = f"parallel-{digest_of(FORMAT, asdict(text), stats)}"
    store = Store(prepared_folder(cache_dir, name, make, report))
    _tell(store, text, policy)
    return store


def _tell(store: Store, text: ParallelText, policy: Mapping[str, str]) -> None:
    """Warns of what was left out when the store was made, and of vocabularies smaller than asked for.

    Raises:
        ConfigurationError: it was made with defects dropped that are to be refused now.
    """
    used = f"parallel text: {sum(store.sizes.values()):,} of {{lines}} training pairs are used"
    notices = [defect_notice(store.folder, policy, used)]
    wanted = text.vocabularies
    if wanted.shared:
        notices.append(smaller_notice("vocabulary", wanted.source, store.source_vocabulary))
    else:
        notices.append(smaller_notice("source_vocabulary", wanted.source, store.source_vocabulary))
        notices.append(smaller_notice("target_vocabulary", wanted.target, store.target_vocabulary))
    for notice in filter(None, notices):
        log.warning("%s", notice)
