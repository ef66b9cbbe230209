"""Prepares parallel text in a process of its own and stops at a given place, to be killed there."""

import sys
import time
from dataclasses import replace
from pathlib import Path

from gpipe_cli.data.parallel.source import ParallelTextSource
from gpipe_cli.data.source import Report
from gpipe_cli.data.store import Sizes, Store


def prepare(root: Path, cache: Path, workers: int, report: Report) -> Store:
    """Prepares with pieces, blocks and shards so small that there are many."""
    keys = {"source_vocabulary": 300, "target_vocabulary": 300, "preparation_workers": workers}
    source = ParallelTextSource(str(root), cache_dir=str(cache), **keys)
    source.text = replace(source.text, piece=20, sizes=Sizes(block=16, shard=64))
    source.prepare(report)
    return source._store


def main(root: str, cache: str, workers: str, stop_text: str, stop_at: str) -> None:
    def report(text: str, done: int, total: int) -> None:
        if stop_text in text and done >= int(stop_at):
            print("stopped", flush=True)
            time.sleep(600)

    prepare(Path(root), Path(cache), int(workers), report)


if __name__ == "__main__":
    main(*sys.argv[1:])
