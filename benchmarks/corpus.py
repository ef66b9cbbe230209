"""Measures how fast a store of parallel text is opened and read, and in how much memory, as the corpus grows.

Writes corpora of token ids in the tool's own format (random ids, lengths as of real sentences, 102 languages of sizes
100,000 : 1), opens each in a new process with files that are not in the kernel's cache, and reads mini-batches of
`--tokens` target tokens in 16 micro-batches. `anonymous` is the process's own memory, `mapped` are pages of files,
which the kernel reclaims when it needs them; the memory that importing torch takes is subtracted from both. Needs 110
bytes of disk per pair. What is in the mini-batches is measured by `benchmarks.updates`.
"""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Row, in_new_process, parser, report
from gpipe_cli.data.source import Batch, no_report
from gpipe_cli.data.source import Report as Progress
from gpipe_cli.data.store import LanguageSummary, Sizes, Store, write_description, write_shard
from gpipe_cli.data.translation import PairSource
from gpipe_cli.data.vocabulary import train_vocabulary

LANGUAGES = 102
SMALLEST_SHARE = 1e-5  # pairs of the least resourced language over those of the best
COLUMNS = {"pairs": ",d", "GB": ".2f", "open, s": ".2f", "open, MB": ".0f", "first batch, s": ".2f", "tokens/s": ",.0f"}
COLUMNS |= {"anonymous, MB": ".0f", "mapped, MB": ".0f"}


def forget(folder: Path) -> None:
    """Removes the files from the kernel's cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def memory() -> tuple[float, float]:
    """Returns the MB of this process's own memory and of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    said = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return tuple(int(said[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile"))  # type: ignore[return-value]


class StoredPairs(PairSource):
    """Reads an existing store, without the thread that reads ahead, so that its work is timed."""

    def __init__(self, folder: Path, tokens: int) -> None:
        super().__init__(None, tokens, 5.0, 512, 3, 0)
        self._folder = folder

    def _open(self, report: Progress) -> Store:
        return Store(self._folder)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        return self._train(0, 0, M, replica, replicas)


def generate(folder: Path, pairs: int) -> None:
    """Writes a store of about so many pairs."""
    draw = np.random.default_rng(0)
    noise = draw.integers(4, 32_000, 2**24, np.uint16)
    shares = SMALLEST_SHARE ** (np.arange(LANGUAGES) / (LANGUAGES - 1))
    folder.mkdir()
    languages = {}
    (folder / "defects.json").write_text('{"counts": {}}')
    for number, count in enumerate(np.maximum(20, pairs * shares / shares.sum()).astype(int).tolist()):
        code = f"x{number}"
        shards: list[LanguageSummary] = []
        for first in range(0, count, Sizes().shard):
            size = min(Sizes().shard, count - first)
            target = np.clip(draw.lognormal(3.1, 0.6, size), 1, 200)
            source = np.clip(target * draw.normal(1.1, 0.15, size), 1, 200)
            lengths = np.stack([source, target], 1).astype(np.uint16)
            tokens = np.resize(noise, int(lengths.sum(dtype=np.int64)))
            write_shard(folder, code, len(shards), tokens, lengths, Sizes().block)
            shards.append(LanguageSummary.of_shard(lengths))
        languages[code] = LanguageSummary.of_shards(shards)
    (folder / "source.model").write_bytes(train_vocabulary([f"{n} a b c" for n in range(100)], 19))
    write_description(folder, languages, Sizes().block, {})


def read(folder: Path, tokens: int, batches: int) -> Row:
    """Returns the figures of opening and reading."""
    before, libraries = memory()
    began = time.perf_counter()
    source = StoredPairs(folder, tokens)
    source.prepare(no_report)
    opened, (own, _) = time.perf_counter() - began, memory()
    stream = source.train(None, 16, 0, 1)
    began = time.perf_counter()
    next(stream)
    first = time.perf_counter() - began
    began, target = time.perf_counter(), 0
    for batch in islice(stream, batches):
        target += sum(int((of[0] != 0).sum()) for _, of in batch.micro_batches)
    seconds = time.perf_counter() - began
    own_after, mapped = memory()
    row: Row = {"open, s": opened, "open, MB": own - before, "first batch, s": first}
    return row | {"tokens/s": target / seconds, "anonymous, MB": own_after - before, "mapped, MB": mapped - libraries}


def measure(pairs: int, folder: Path, arguments: Namespace) -> Row:
    """Writes a store and reads it in a new process."""
    generate(folder / "store", pairs)
    forget(folder)
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    figures = in_new_process(read, folder / "store", arguments.tokens, arguments.batches)
    return {"pairs": pairs, "GB": written / 1e9, **figures}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    options.add_argument("--tokens", type=int, default=260_000, help="target tokens of a mini-batch (default: 260,000)")
    options.add_argument("--batches", type=int, default=100, help="mini-batches that are timed (default: 100)")
    options.add_argument("--folder", default=None, help="where to write (default: the folder for temporary files)")
    arguments = options.parse_args()

    def rows() -> Iterator[Row]:
        for pairs in [100_000] if arguments.quick else arguments.pairs:
            with tempfile.TemporaryDirectory(prefix="corpus-", dir=arguments.folder) as folder:
                yield measure(pairs, Path(folder), arguments)

    report(COLUMNS, rows(), arguments.output)


if __name__ == "__main__":
    main()
