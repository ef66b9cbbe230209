"""Prints how modules compare with themselves, cut into cells on three processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.common import Row, report
from benchmarks.traced.check import PROCESSES, Member, find
from benchmarks.traced.modules import subject

COLUMNS = {"module": "", "layers": "d", "verdict": "", "cuts": "", "seconds": ".1f", "where": ""}


def print_table(rank: int, folder: str, names: Sequence[str], output: Path | None) -> None:
    """Compares all modules as one of the processes; the first prints a row for each, and ends with 1 if one differs."""
    torch.set_num_threads(1)
    member = Member(rank, dist.FileStore(f"{folder}/store", PROCESSES))
    member.store.set_timeout(timedelta(hours=1))  # while the first compares
    if rank > 0:
        for name in names:
            find(subject(name), member=member)
        return
    wrong = []

    def rows() -> Iterator[Row]:
        for name in names:
            found = find(subject(name), member=member)
            verdict = "DIFFERENT" if found.layers else "refused"
            if found.equal:
                verdict = f"{found.difference:.0e}" if found.difference else "same bits"
            cuts = "same bits" if found.same_cuts else "DIFFERENT"
            wrong.extend([] if found.verified else [name])
            yield {"module": name, **vars(found), "verdict": verdict, "cuts": cuts}

    report(COLUMNS, rows(), output, lambda rows: [f"verified: {len(rows) - len(wrong)} of {len(rows)}"])
    sys.exit(bool(wrong))
