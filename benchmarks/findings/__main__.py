"""Runs the pieces of the paper's findings that the log lacks, in order, and draws the page.

Each piece is one gpipe-train of minutes on one core, then gpipe-eval where there is a test set. A piece that was
interrupted goes on from its last checkpoint; every finished one is a line of log.jsonl, here. Started twice, the
commands share the work.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.findings.page import draw
from benchmarks.findings.pieces import Log, Piece, read_experiments
from benchmarks.findings.runs import complete, run
from gpipe_cli.disk import locked

HERE, RUNS = Path(__file__).parent, ROOT / "sweeps" / "findings"
LOG, SENTENCES, PAGE = HERE / "log.jsonl", HERE / "sentences", ROOT / "docs" / "measurements" / "findings.md"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", nargs="+", metavar="EXPERIMENT", help="of experiments.yaml; default: all, in its order")
    given = made.parse_args()
    experiments = read_experiments(HERE / "experiments.yaml")
    if unknown := [name for name in given.only or () if name not in experiments]:
        made.error(f"--only: there is no experiment {', '.join(unknown)}, only {', '.join(experiments)}")
    pieces = [piece for name in given.only or experiments for piece in experiments[name].pieces()]
    try:
        work(pieces)
    finally:
        draw(PAGE, list(experiments.values()), Log.read(LOG), SENTENCES)


def work(pieces: Sequence[Piece]) -> None:
    """Runs the pieces that the log lacks, each as soon as the runs and rates that it needs are there.

    Raises:
        CommandFailed: a piece failed.
    """
    while True:
        log = Log.read(LOG)
        left = [piece for piece in pieces if log.record(piece) is None]
        wanted = [piece for one in left for piece in (one.source, one) if piece and _ready(piece, log)]
        for piece in wanted:
            with _claimed(RUNS / piece.folder) as is_mine:
                if is_mine and _ready(piece, Log.read(LOG)):  # no other command has just ended it
                    print(f"{piece.experiment.name}: {piece.name}", flush=True)
                    record = run(piece, log, RUNS, SENTENCES)
                    if log.record(piece) is None:
                        with LOG.open("a", encoding="utf-8") as lines:
                            lines.write(json.dumps(record) + "\n")
                    break
        else:
            return


def _ready(piece: Piece, log: Log) -> bool:
    """Says whether a piece can run and is to: its record is missing, or its run, which another piece begins with."""
    if log.record(piece) is not None and complete(RUNS / piece.folder):
        return False
    return piece.words(log) is not None and (piece.source is None or complete(RUNS / piece.source.folder))


@contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    """Says whether the run directory is ours: no other command works in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        yield locked(lock.fileno())


if __name__ == "__main__":
    main()
