"""Measures what preparing parallel text costs, in seconds and memory a line, on lines made on the spot.

    python -m benchmarks.preparation --lines 100000 1000000 10000000

The lines are of one language, of 1 to 24 made-up words a side. The vocabularies, which are trained on at most
--vocabulary-pairs pairs, are left out of the seconds of a million lines. Memory is the most that was resident at once,
in the process that prepares and in the largest of its workers, which do the work where there are several (--workers).
"""

from __future__ import annotations

import itertools
import random
import resource
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import Row, parser, report
from gpipe_cli.data.parallel.source import ParallelTextSource

COLUMNS = {
    "lines": ",",
    "workers": "",
    "counting, s": ".1f",
    "vocabularies, s": ".1f",
    "ids, s": ".1f",
    "shards, s": ".1f",
}
COLUMNS |= {"a million lines, s": ".2f", "memory, MB": ".0f", "of a worker, MB": ".0f", "store, MB": ".0f"}
PHASES = {"counting lines": "counting", "vocabulary": "vocabularies", "token ids": "ids", "shards": "shards"}
LONGEST, STREAM = 24, 1 << 20


def write_side(file: Path, lines: int, seed: int) -> None:
    """Writes lines of 1 to `LONGEST` words, of which few are frequent and many are rare."""
    draw = random.Random(seed)
    syllables = [consonant + vowel for consonant in "bdfghklmnprstvz" for vowel in "aeiou"]
    lexicon = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(30_000)]
    stream = draw.choices(lexicon, [1 / rank for rank in range(1, len(lexicon) + 1)], k=STREAM)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(lines):
            start = draw.randrange(STREAM - LONGEST)
            out.write(" ".join(stream[start : start + draw.randint(1, LONGEST)]) + "\n")


def prepare(root: Path, options: Namespace) -> Row:
    """Prepares the text below `root`; returns the seconds of each phase, and the memory."""
    reached = dict[str, float]()

    def notice(text: str, done: int, total: int) -> None:
        phase = next((phase for words, phase in PHASES.items() if text.endswith(words)), None)
        if phase is not None:
            reached.setdefault(phase, time.perf_counter())

    source = ParallelTextSource(
        str(root / "text"),
        source_vocabulary=options.vocabulary,
        target_vocabulary=options.vocabulary,
        cache_dir=str(root / "cache"),
        vocabulary_pairs=options.vocabulary_pairs,
        preparation_workers=options.workers,
    )
    source.prepare(notice)
    moments = itertools.pairwise([*reached.values(), time.perf_counter()])
    seconds = {f"{phase}, s": end - begin for phase, (begin, end) in zip(reached, moments, strict=True)}
    used = [resource.getrusage(of).ru_maxrss / 1024 for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    stored = sum(file.stat().st_size for file in (root / "cache").rglob("*") if file.is_file())
    return {**seconds, "memory, MB": used[0], "of a worker, MB": used[1], "store, MB": stored / 1e6}


def measured(options: Namespace) -> Iterator[Row]:
    """Yields a row for each number of lines."""
    for lines in [20_000, 100_000] if options.quick else options.lines:
        with TemporaryDirectory(dir=options.folder) as name:
            (text := Path(name) / "text").mkdir()
            for seed, side in enumerate(("de", "en")):
                write_side(text / f"train.{side}", lines, seed)
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                row = process.submit(prepare, Path(name), options).result()
        of_lines = sum(row[f"{phase}, s"] for phase in PHASES.values() if phase != "vocabularies")
        yield {"lines": lines, "workers": options.workers, "a million lines, s": of_lines / lines * 1e6, **row}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--lines", type=int, nargs="+", default=[100_000, 1_000_000])
    options.add_argument("--workers", type=int, default=1, help="processes that prepare (1: this one alone)")
    options.add_argument("--vocabulary", type=int, default=4_000, help="pieces of each side")
    options.add_argument("--vocabulary-pairs", type=int, default=100_000)
    options.add_argument("--folder", help="where text and cache are written for the time; default: as tempfile")
    chosen = options.parse_args()
    report(COLUMNS, measured(chosen), chosen.output)


if __name__ == "__main__":
    main()
