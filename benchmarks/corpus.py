"""Measures how fast training data is prepared, opened and read, and in how much memory, each in a new process.

pairs: stores of parallel text of `--size` pairs in the tool's own format (random ids, lengths as of real sentences, 102
languages of sizes 100,000 : 1); mini-batches of `--tokens` target tokens in 16 micro-batches. Needs 110 bytes of disk
per pair. What is in the mini-batches is measured by `benchmarks.updates`.
text: `--size` MB of made-up words (frequencies by Zipf's law, in Latin, Cyrillic and Greek letters), prepared as
`data=text` does by `--processes`; mini-batches of 32 windows of 1,024 tokens.

Files are not in the kernel's cache when they are read. `anonymous` is the process's own memory, `mapped` are pages of
files, which the kernel reclaims when it needs them; the memory that importing torch takes is subtracted from both.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Row, in_new_process, parser, report
from gpipe_cli.data.source import Batch, Source, no_report
from gpipe_cli.data.source import Report as Progress
from gpipe_cli.data.store import LanguageSummary, Sizes, Store, write_description, write_shard
from gpipe_cli.data.text.source import TextFilesSource
from gpipe_cli.data.translation import PairSource
from gpipe_cli.data.vocabulary import train_vocabulary

LANGUAGES = 102
SMALLEST_SHARE = 1e-5  # pairs of the least resourced language over those of the best
SOUNDS = [
    a + b
    for some, more in (("bdfgklmnprst", "aeiou"), ("бвгдклмнпрст", "аеиоу"), ("βγδκλμνπρστ", "αειου"))
    for a in some
    for b in more
]
WORDS, ZIPF = 200_000, 1.1
SIZES = {"pairs": [1_000_000, 10_000_000, 100_000_000], "text": [400]}
QUICK_SIZES = {"pairs": [100_000], "text": [2]}
OPENED = {"open, s": ".2f", "open, MB": ".0f", "first batch, s": ".2f", "tokens/s": ",.0f"}
OPENED |= {"anonymous, MB": ".0f", "mapped, MB": ".0f"}
COLUMNS = {
    "pairs": {"pairs": ",d", "GB": ".2f", **OPENED},
    "text": {"MB": ",.0f", "vocabulary, s": ".0f", "tokens": ",d", "tokens, s": ",.0f", "peak, MB": ",.0f", **OPENED},
}


# -- opening and reading -----------------------------------------------------------------------------------------------


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


def read(source: Source, M: int, batches: int) -> Row:
    """Returns the figures of opening and reading."""
    before, libraries = memory()
    began = time.perf_counter()
    source.prepare(no_report)
    opened, (own, _) = time.perf_counter() - began, memory()
    stream = source.train(None, M, 0, 1)
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


# -- pairs -------------------------------------------------------------------------------------------------------------


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


def read_pairs(folder: Path, arguments: Namespace) -> Row:
    return read(StoredPairs(folder, arguments.tokens), 16, arguments.batches)


def pairs(size: int, folder: Path, arguments: Namespace) -> Row:
    """Writes a store and reads it in a new process."""
    generate(folder / "store", size)
    forget(folder)
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"pairs": size, "GB": written / 1e9, **in_new_process(read_pairs, folder / "store", arguments)}


# -- text --------------------------------------------------------------------------------------------------------------


def write_text(path: Path, megabytes: int) -> None:
    """Writes documents of 220 made-up words."""
    draw = np.random.default_rng(0)
    lengths, chosen = draw.integers(1, 5, WORDS).tolist(), draw.integers(0, len(SOUNDS), (WORDS, 4)).tolist()
    words = ["".join(SOUNDS[i] for i in of[:length]) for of, length in zip(chosen, lengths, strict=True)]
    shares = np.cumsum(1 / np.arange(1, WORDS + 1) ** ZIPF)
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < 1e6 * megabytes:
            rows = np.searchsorted(shares, draw.random((1_000, 220)) * shares[-1]).tolist()
            file.writelines(" ".join([words[i] for i in row]) + "\n\n" for row in rows)


def prepare_text(folder: Path, processes: int) -> Row:
    began, first, tokens = time.perf_counter(), 0.0, 0

    def progress(text: str, done: int, total: int) -> None:
        nonlocal first, tokens
        if text == "text: tokens":
            first, tokens = first or time.perf_counter(), done

    root, cache = str(folder / "text"), str(folder / "cache")
    TextFilesSource(root, cache_dir=cache, preparation_workers=processes).prepare(progress)
    row: Row = {"vocabulary, s": first - began, "tokens, s": time.perf_counter() - first, "tokens": tokens}
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return row | {"peak, MB": max(peaks) / 1e3}


def read_text(folder: Path, arguments: Namespace) -> Row:
    return read(TextFilesSource(str(folder / "text"), cache_dir=str(folder / "cache")), 1, arguments.batches)


def text(size: int, folder: Path, arguments: Namespace) -> Row:
    """Prepares text in a new process, and reads it in another."""
    (folder / "text").mkdir()
    write_text(folder / "text" / "made-up.txt", size)
    prepared = in_new_process(prepare_text, folder, arguments.processes)
    forget(folder)
    return {"MB": size, **prepared, **in_new_process(read_text, folder, arguments)}


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    options = parser(__doc__)
    options.add_argument("kind", choices=SIZES)
    options.add_argument("--size", type=int, nargs="+", help="pairs, or MB; default: 1, 10 and 100 million, or 400")
    options.add_argument("--tokens", type=int, default=260_000, help="target tokens of a mini-batch (default: 260,000)")
    options.add_argument("--batches", type=int, default=100, help="mini-batches that are timed (default: 100)")
    options.add_argument("--processes", type=int, default=2, help="that prepare text (default: 2)")
    options.add_argument("--folder", default=None, help="where to write (default: the folder for temporary files)")
    arguments = options.parse_args()
    measure = pairs if arguments.kind == "pairs" else text

    def rows() -> Iterator[Row]:
        for size in arguments.size or (QUICK_SIZES if arguments.quick else SIZES)[arguments.kind]:
            with tempfile.TemporaryDirectory(prefix="corpus-", dir=arguments.folder) as folder:
                yield measure(size, Path(folder), arguments)

    report(COLUMNS[arguments.kind], rows(), arguments.output)


if __name__ == "__main__":
    main()
