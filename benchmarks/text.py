"""Measures how fast text is prepared for a language model, and read: tokens per second by the number of processes.

Writes a file of `--megabytes` of made-up words (frequencies by Zipf's law, documents of about 1,300 bytes), prepares it
as `data=text` does, in a new process each time, and reads 200 mini-batches of 32 windows of 1,024 tokens. Columns:
`vocabulary, s` is the time until the vocabulary is trained; `tokens/s` counts from there; `peak, MB` is the most memory
of the largest process; `read, tokens/s` are tokens of mini-batches per second.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.common import Row, parser, report
from gpipe_cli.data.text.source import TextFilesSource

WORDS = 200_000
ZIPF = 1.1


def generate(path: Path, megabytes: int) -> None:
    """Writes about so much text."""
    draw = np.random.default_rng(0)
    sounds = [c + v for c in "bdfghklmnprstvz" for v in "aeiou"]
    lengths = draw.integers(1, 5, WORDS)
    words = ["".join(sounds[i] for i in draw.integers(0, len(sounds), n)) for n in lengths]
    shares = 1 / np.arange(1, WORDS + 1) ** ZIPF
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < 1e6 * megabytes:
            chosen = draw.choice(WORDS, (1_000, 220), p=shares / shares.sum())
            file.write("\n\n".join(" ".join(words[i] for i in row) for row in chosen.tolist()) + "\n\n")


def prepare(root: str, cache: str, processes: int) -> None:
    """Prepares and reads the text; prints the figures as JSON."""
    began, first, tokens = time.perf_counter(), 0.0, 0

    def progress(text: str, done: int, total: int) -> None:
        nonlocal first, tokens
        if text == "text: tokens":
            first, tokens = first or time.perf_counter(), done

    source = TextFilesSource(root, cache_dir=cache, preparation_workers=processes)
    source.prepare(progress)
    ended = time.perf_counter()
    mini_batches = islice(source.train(None, 1, 0, 1), 200)
    windows = sum(len(inputs[0]) for batch in mini_batches for inputs, _ in batch.micro_batches)
    figures = {"vocabulary, s": first - began, "tokens/s": tokens / (ended - first), "tokens": tokens}
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1e3
    read = 1_024 * windows / (time.perf_counter() - ended)
    print(json.dumps({**figures, "peak, MB": peak, "read, tokens/s": read}))


def measure(processes: int, root: Path, arguments: Namespace) -> Row:
    """Prepares the text in a new process with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="text-", dir=arguments.folder) as cache:
        words = [sys.executable, "-m", "benchmarks.text", "--root", str(root), "--cache", cache]
        done = subprocess.run([*words, "--processes", str(processes)], check=True, capture_output=True)
        return {"processes": processes, "MB": root.stat().st_size / 1e6, **json.loads(done.stdout)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, default=400)
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    options.add_argument("--folder", default=None, help="where to write (default: the folder for temporary files)")
    options.add_argument("--root", default=None, help="a text to prepare: for processes that this command starts")
    options.add_argument("--cache", default=None, help="... and its cache")
    arguments = options.parse_args()
    if arguments.root:
        prepare(arguments.root, arguments.cache, *arguments.processes)
        return
    with tempfile.TemporaryDirectory(prefix="text-", dir=arguments.folder) as folder:
        root = Path(folder) / "text.txt"
        generate(root, 2 if arguments.quick else arguments.megabytes)
        columns = {"processes": "d", "MB": ",.0f", "tokens": ",d", "vocabulary, s": ".0f", "tokens/s": ",.0f"}
        columns |= {"peak, MB": ",.0f", "read, tokens/s": ",.0f"}
        report(columns, (measure(count, root, arguments) for count in arguments.processes), arguments.output)


if __name__ == "__main__":
    main()
