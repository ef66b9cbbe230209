"""Measures the seconds from the start of gpipe-train to the end of its first training step, with K cells.

Runs the installed command for one step with K cells on K processes, with the data prepared beforehand, and reads
`first_step_seconds` from its summary.json. `command` is the time of the whole command, with its one evaluation, its
checkpoint and the end of all processes. Further arguments go to gpipe-train: `python -m benchmarks.startup debug=tiny`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import Row, parser, report, run_command

OVERRIDES = ("trainer.steps=1", "trainer.evaluate_first=false", "trainer.evaluate_every=null", "trainer.samples=0")


def start_once(K: int, overrides: list[str]) -> tuple[float, float]:
    """Returns the seconds to the end of the first step and of the command.

    Raises:
        SystemExit: the command failed; its output is the message.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        words = [f"pipeline.K={K}", f"pipeline.workers={K}", *OVERRIDES, *overrides, f"hydra.run.dir={directory}"]
        began = time.perf_counter()
        run_command("gpipe-train", words)
        seconds = time.perf_counter() - began
        summary = json.loads((Path(directory) / "summary.json").read_text())
    return float(summary["first_step_seconds"]), seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--K", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="default: 1 2 4 8 16")
    options.add_argument("--repetitions", type=int, default=3, help="starts of each K (default: 3)")
    options.add_argument("overrides", nargs="*", help="for gpipe-train, as model=transformer_lm")
    arguments = options.parse_args()
    repetitions = 1 if arguments.quick else arguments.repetitions
    start_once(1, arguments.overrides)  # prepares the data

    def rows() -> Iterator[Row]:
        reference = None
        for K in arguments.K:
            starts = [start_once(K, arguments.overrides) for _ in range(repetitions)]
            first, whole = (statistics.median(column) for column in zip(*starts, strict=True))
            reference = first if reference is None else reference
            more = {"more than the first K, s": first - reference}
            yield {"K": K, "first step, s": first, **more, "command, s": whole, "starts": starts}

    columns = {"K": "d", "first step, s": ".2f", "more than the first K, s": "+.2f", "command, s": ".2f"}
    report(columns, rows(), arguments.output)


if __name__ == "__main__":
    main()
