"""Tries a table of cases, each in a folder of its own, and says which did not end as promised."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.common import Row, parser, report


def try_cases(
    description: str | None,
    columns: Mapping[str, str],
    cases: Sequence[str],
    quick: int,
    run: Callable[[str, Path], Row],
) -> None:
    """Runs the command line of a benchmark that has a row for each case, and exits with 1 if one of them failed.

    Args:
        quick: tries every so many-th case with --quick.
        run: tries a case in an empty folder; its row has "yes" or "NO" under "as promised".
    """
    arguments = parser(description).parse_args()
    chosen, failed = cases[:: quick if arguments.quick else 1], []

    def rows() -> Iterator[Row]:
        for case in chosen:
            with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
                row = {**run(case, Path(folder)), "case": case}
            failed.extend([case] if row["as promised"] == "NO" else [])
            yield row

    shown = {"case": "", **columns, "as promised": ""}
    report(shown, rows(), arguments.output, lambda _: [f"{len(chosen) - len(failed)} of {len(chosen)} as promised"])
    sys.exit(1 if failed else 0)
