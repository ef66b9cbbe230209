"""Runs the pieces of the paper's findings that the log lacks, in order, and draws the page.

Each piece is one gpipe-train of minutes on one core, then gpipe-eval where there is a test set. A piece that was
interrupted goes on from its last checkpoint; every finished one is a line of log.jsonl, here.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.findings.page import draw
from benchmarks.findings.pieces import Log, Piece, read_experiments
from benchmarks.findings.runs import complete, run

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
    """Runs the pieces that the log lacks, each after the run that it begins with, if that is not there.

    Raises:
        CommandFailed: a piece failed.
    """
    for piece in pieces:
        if Log.read(LOG).record(piece) is not None:
            continue
        source = [piece.source] if piece.source and not complete(RUNS / piece.source.folder) else []
        for one in [*source, piece]:
            print(f"{one.experiment.name}: {one.name}", flush=True)
            log = Log.read(LOG)
            record = run(one, log, RUNS, SENTENCES)
            if log.record(one) is None:
                with LOG.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
