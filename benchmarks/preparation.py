"""Measures what preparing parallel text costs, in seconds and memory a line, on lines made on the spot.

    python -m benchmarks.preparation --lines 100000 1000000 10000000

The lines are of one language, of 1 to 24 made-up words a side. The vocabularies, which are trained on at most
--vocabulary-pairs pairs, are left out of the cost of a million lines: seconds that passed, and those of all processors.
Memory is the most that was resident at once, in the process that prepares and in the largest of its workers, which
do the work where there are several (--workers).
"""

from __future__ import annotations

import itertools
import random
import resource
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import Row, parser, report
from gpipe_cli.data.parallel.source import ParallelTextSource

COLUMNS = {
    "lines": ",", "workers": "", "counting, s": ".1f", "vocabularies, s": ".1f", "ids, s": ".1f", "shards, s": ".1f",
    "a million lines, s": ".2f", "of processors, s": ".2f", "memory, MB": ".0f", "of a worker, MB": ".0f",
    "store, MB": ".0f",
}  # fmt: skip
PHASES = {"counting lines": "counting", "vocabulary": "vocabularies", "token ids": "ids", "shards": "shards"}
WORDS, LONGEST, AT_ONCE = 1 << 20, 24, 10_000


def write_side(file: Path, lines: int, seed: int) -> None:
    """Writes lines of 1 to `LONGEST` words, of which few are frequent and many are rare."""
    draw = random.Random(seed)
    syllables = [consonant + vowel for consonant in "bdfghklmnprstvz" for vowel in "aeiou"]
    lexicon = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(30_000)]
    stream = draw.choices(lexicon, [1 / rank for rank in range(1, len(lexicon) + 1)], k=WORDS)
    with file.open("w", encoding="utf-8") as out:
        for first in range(0, lines, AT_ONCE):
            starts = draw.choices(range(WORDS - LONGEST), k=min(AT_ONCE, lines - first))
            lengths = draw.choices(range(1, LONGEST + 1), k=len(starts))
            pieces = (stream[start : start + length] for start, length in zip(starts, lengths, strict=True))
            out.writelines(" ".join(piece) + "\n" for piece in pieces)


def prepare(root: Path, workers: int, vocabulary: int, vocabulary_pairs: int) -> Row:
    """Prepares the text below `root`; returns the seconds of each phase and of all processors, and the memory."""
    cache, reached, memory = root / "cache", dict[str, tuple[float, float]](), dict[int | str, float]()

    def notice(text: str, done: int, total: int) -> None:
        phase = next((phase for words, phase in PHASES.items() if text.endswith(words)), None)
        if phase is not None:
            reached.setdefault(phase, (time.perf_counter(), _processor_seconds()))
        memory.update({child.pid or 0: peak_megabytes(child.pid) for child in active_children()})

    source = ParallelTextSource(
        str(root / "text"), source_vocabulary=vocabulary, target_vocabulary=vocabulary, cache_dir=str(cache),
        vocabulary_pairs=vocabulary_pairs, preparation_workers=workers, smaller_vocabulary=True,
    )  # fmt: skip
    source.prepare(notice)
    bounds = [*reached.values(), (time.perf_counter(), _processor_seconds())]
    passed = [(end[0] - start[0], end[1] - start[1]) for start, end in itertools.pairwise(bounds)]
    seconds = {f"{phase}, s": wall for phase, (wall, _) in zip(reached, passed, strict=True)}
    processors = {f"{phase}, processor": used for phase, (_, used) in zip(reached, passed, strict=True)}
    stored = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    most = {"memory, MB": peak_megabytes("self"), "of a worker, MB": max(memory.values(), default=None)}
    return {**seconds, **processors, **most, "store, MB": stored / 1e6}


def peak_megabytes(process: int | str | None) -> float:
    """Returns the most memory that a running process, a number or "self", has held at once."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def _processor_seconds() -> float:
    """Returns the seconds that this process and those that it started and that ended took of all processors."""
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(of.ru_utime + of.ru_stime for of in used)


def measured(options: Namespace) -> Iterator[Row]:
    """Yields a row for each number of lines and workers."""
    for lines in [20_000, 100_000] if options.quick else options.lines:
        with TemporaryDirectory(dir=options.folder) as name:
            root = Path(name)
            (root / "text").mkdir()
            for seed, side in enumerate(("de", "en")):
                write_side(root / "text" / f"train.{side}", lines, seed)
            words = (root, options.workers, options.vocabulary, options.vocabulary_pairs)
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                row = process.submit(prepare, *words).result()
        for title, ending in (("a million lines, s", "s"), ("of processors, s", "processor")):
            of_lines = sum(row[f"{phase}, {ending}"] for phase in PHASES.values() if phase != "vocabularies")
            row[title] = of_lines / lines * 1e6
        yield {"lines": lines, "workers": options.workers, **row}


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
