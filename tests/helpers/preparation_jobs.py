"""Prepares parallel text in a process of its own and stops at a given place, to be killed there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gpipe_cli.data.defects import check_policy
from gpipe_cli.data.parallel.folders import find_pairs
from gpipe_cli.data.parallel.pieces import ParallelText, Vocabularies
from gpipe_cli.data.parallel.source import open_parallel_store
from gpipe_cli.data.source import Report
from gpipe_cli.data.store import Sizes, Store


def prepare(root: Path, cache: Path, workers: int, report: Report) -> Store:
    """Prepares with pieces, blocks and shards so small that there are many."""
    text = ParallelText(str(root), None, "en", Vocabularies(300, 300), 96, 0, piece=20, sizes=Sizes(block=16, shard=64))
    pairs = find_pairs(str(root), None, "en")
    return open_parallel_store(text, pairs, check_policy({}), str(cache), workers, report)


def main(root: str, cache: str, workers: str, stop_text: str, stop_at: str) -> None:
    def report(text: str, done: int, total: int) -> None:
        if stop_text in text and done >= int(stop_at):
            print("stopped", flush=True)
            time.sleep(600)

    prepare(Path(root), Path(cache), int(workers), report)


if __name__ == "__main__":
    main(*sys.argv[1:])
