"""Measures how fast text is prepared for a language model, opened and read, by the number of processes.

Writes `--megabytes` of made-up words (frequencies by Zipf's law, documents of about 2,000 bytes in Latin, Cyrillic and
Greek letters or digits) into `--files` files, prepares them as `data=text` does, in a new process each time, and
reads 200 mini-batches of 32 windows of 1,024 tokens. Columns: `vocabulary, s` and `tokens, s` are the seconds until
the vocabulary is trained and from then on; `peak, MB` is the most memory of the largest process; `open, s` and
`open, MB` are what another process takes to open what is prepared, until the first mini-batch; `read, tokens/s`
are tokens of mini-batches per second, from files that are not in the kernel's cache.

With `--kill` the preparation is killed when half of the text is done, and begun again: the seconds are then those of
the second process alone, `killed after, s` are those of the first, and `pieces kept` counts what it had left.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.common import Row, in_new_process, parser, report
from benchmarks.corpus import memory
from gpipe_cli.data.source import no_report
from gpipe_cli.data.text.source import TextFilesSource

WORDS = 200_000
ZIPF = 1.1
SCRIPTS = (
    ("bdfghklmnprstvz", "aeiou"),
    ("бвгджзклмнпрст", "аеиоу"),
    ("βγδζκλμνπρσ", "αειου"),
    ("0123456789", "0123456789"),
)
BYTES_OF_IDS = 0.5  # for each byte of text
KINDS = (".txt", ".jsonl", ".jsonl.gz")


def generate(folder: Path, megabytes: int, files: int) -> None:
    """Writes about so much text, in files of all `KINDS` in turn; each document is written in one of `SCRIPTS`."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as processes:
        list(processes.map(_write, [folder] * files, range(files), [megabytes / files] * files))


def _write(folder: Path, number: int, megabytes: float) -> None:
    draw, kind = np.random.default_rng(number), KINDS[number % len(KINDS)]
    words = [_words(consonants, vowels) for consonants, vowels in SCRIPTS]
    shares = np.cumsum(1 / np.arange(1, WORDS + 1) ** ZIPF)
    written = 0
    path = folder / f"{number:03}{kind}"
    with (
        gzip.open(path, "wt", 1, encoding="utf-8") if kind.endswith(".gz") else path.open("w", encoding="utf-8") as file
    ):
        while written < 1e6 * megabytes:
            chosen = np.searchsorted(shares, draw.random((1_000, 220)) * shares[-1])
            script = draw.integers(len(SCRIPTS), size=1_000).tolist()
            texts = [" ".join([words[of][i] for i in row]) for of, row in zip(script, chosen.tolist(), strict=True)]
            lines = [
                text + "\n\n" if kind == ".txt" else json.dumps({"text": text}, ensure_ascii=False) + "\n"
                for text in texts
            ]
            file.writelines(lines)
            written += sum(len(line.encode()) for line in lines)


def _words(consonants: str, vowels: str) -> list[str]:
    draw, sounds = np.random.default_rng(0), [c + v for c in consonants for v in vowels]
    lengths, chosen = draw.integers(1, 5, WORDS).tolist(), draw.integers(0, len(sounds), (WORDS, 4)).tolist()
    return ["".join(sounds[i] for i in of[:length]) for of, length in zip(chosen, lengths, strict=True)]


def prepare(root: str, cache: str, processes: int) -> Row:
    """Prepares the text and returns the figures."""
    began, first, tokens = time.perf_counter(), 0.0, 0

    def progress(text: str, done: int, total: int) -> None:
        nonlocal first, tokens
        if text == "text: tokens":
            first, tokens = first or time.perf_counter(), done

    TextFilesSource(root, cache_dir=cache, preparation_workers=processes).prepare(progress)
    ended = time.perf_counter()
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1e3
    return {"vocabulary, s": first - began, "tokens, s": ended - first, "tokens": tokens, "peak, MB": peak}


def read(root: str, cache: str) -> Row:
    """Opens what is prepared, reads 200 mini-batches, and returns the figures."""
    for path in Path(cache).rglob("*.npy"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (before, _), began = memory(), time.perf_counter()
    source = TextFilesSource(root, cache_dir=cache)
    source.prepare(no_report)
    mini_batches = source.train(None, 1, 0, 1)
    next(mini_batches)
    opened = {"open, s": time.perf_counter() - began, "open, MB": memory()[0] - before}
    began = time.perf_counter()
    windows = sum(len(inputs[0]) for batch in islice(mini_batches, 200) for inputs, _ in batch.micro_batches)
    return opened | {"read, tokens/s": 1_024 * windows / (time.perf_counter() - began)}


def measure(processes: int, root: Path, arguments: Namespace) -> Row:
    """Prepares the text in a new process with an empty cache, and reads it in another."""
    with tempfile.TemporaryDirectory(prefix="text-", dir=arguments.folder) as cache:
        size = sum(path.stat().st_size for path in root.iterdir())
        row = {"processes": processes, "MB": size / 1e6, "killed after, s": 0.0, "pieces kept": 0}
        if arguments.kill:
            row |= _kill_halfway(str(root), Path(cache), processes, 1e6 * arguments.megabytes)
        return row | in_new_process(prepare, str(root), cache, processes) | in_new_process(read, str(root), cache)


def _kill_halfway(root: str, cache: Path, processes: int, size: float) -> Row:
    """Kills a preparation and its processes when half of the text is done, which has so many bytes."""
    began = time.perf_counter()
    process = get_context("spawn").Process(target=_prepare_in_a_session, args=(root, str(cache), processes))
    process.start()
    while sum(path.stat().st_size for path in cache.rglob("*.npy")) < BYTES_OF_IDS * size / 2:
        if not process.is_alive():
            raise SystemExit("the preparation ended before it was killed: use more --megabytes")
        time.sleep(0.1)
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return {"killed after, s": time.perf_counter() - began, "pieces kept": len(list(cache.rglob("*.train.npy")))}


def _prepare_in_a_session(root: str, cache: str, processes: int) -> None:
    os.setsid()  # so that one signal reaches this process and those that it starts
    prepare(root, cache, processes)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, default=400)
    options.add_argument("--files", type=int, default=3)
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    options.add_argument("--kill", action="store_true", help="kill each preparation once, and go on")
    options.add_argument("--folder", default=None, help="where to write (default: the folder for temporary files)")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="text-", dir=arguments.folder) as folder:
        generate(Path(folder), 2 if arguments.quick else arguments.megabytes, arguments.files)
        columns = {"processes": "d", "MB": ",.0f", "tokens": ",d", "vocabulary, s": ".0f", "tokens, s": ",.0f"}
        columns |= {"killed after, s": ",.0f", "pieces kept": "d"} if arguments.kill else {}
        columns |= {"peak, MB": ",.0f", "open, s": ".2f", "open, MB": ".0f", "read, tokens/s": ",.0f"}
        report(columns, (measure(count, Path(folder), arguments) for count in arguments.processes), arguments.output)


if __name__ == "__main__":
    main()
