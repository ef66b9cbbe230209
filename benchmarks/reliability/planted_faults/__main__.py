"""Runs gpipe-verify once for each planted fault and reports which were caught and which were named.

Columns: caught, whether gpipe-verify said DIFFERENT; named, whether its findings have the right place and cause.
Arguments that are no options are names of faults: only these run, and what gpipe-verify said is printed.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import Row, parser, report

from .fault import FAULTS, Fault
from .run import planted_report

COLUMNS = {"fault": "", "what goes wrong": "", "caught": "", "named": "", "seconds": ".1f"}


def tried(fault: Fault, folder: Path) -> Row:
    """Returns the row of one fault, with gpipe-verify's findings under "said"."""
    began = time.perf_counter()
    try:
        found = planted_report(folder, fault)
        caught, said = not found["agrees"], found["findings"]
    except Exception as error:  # the fault does not fit the code any more
        caught, said = False, [f"{type(error).__name__}: {error}"]
    text = "\n".join(said)
    named = caught and all(re.search(pattern, text, re.DOTALL) for pattern in (fault.place, fault.cause))
    answers = "yes" if caught else "NO", "yes" if named else "NO"
    seconds = time.perf_counter() - began
    return {**dict(zip(COLUMNS, (fault.name, fault.about, *answers, seconds), strict=True)), "said": said}


def rates(rows: Sequence[Row]) -> list[str]:
    """Returns both rates as a sentence, and the names of what was missed."""
    missed = {answer: [row["fault"] for row in rows if row[answer] != "yes"] for answer in ("caught", "named")}
    total = len(rows)
    text = f"{total} faults: {total - len(missed['caught'])} caught, {total - len(missed['named'])} named"
    return [text, *(f"not {answer}: {', '.join(names)}" for answer, names in missed.items() if names)]


def main() -> int:
    """Runs the command."""
    line = parser(__doc__)
    line.add_argument("names", nargs="*", metavar="FAULT", help="; ".join(FAULTS))
    given = line.parse_args()
    if unknown := [name for name in given.names if name not in FAULTS]:
        line.error(f"{unknown[0]}: no fault; use one of {', '.join(FAULTS)}")
    chosen = [FAULTS[name] for name in given.names or FAULTS]
    if given.quick:
        chosen = [fault for fault in chosen if fault.workers == fault.replicas == 1]
    with tempfile.TemporaryDirectory() as folder:

        def rows() -> Iterator[Row]:
            for fault in chosen:
                kept.append(tried(fault, Path(folder) / fault.name))
                yield kept[-1]

        kept: list[Row] = []
        report(COLUMNS, rows(), given.output, rates)
    for row in kept if given.names else []:
        print("\n".join(["", f"{row['fault']}:", *row["said"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
