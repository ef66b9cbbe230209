"""Traces modules as researchers write them, and architectures of torchvision and the transformers library.

Each becomes a list of layers, is cut into K = 1, 2 and 4 cells and takes two steps with and without
re-materialization, each followed by an evaluation. Outputs, gradients and buffers are compared by name with those of
the module itself by torch's own autograd; a module may be refused instead, with the line of its code. Names on the
command line, of modules or as `as_written` and `torchvision`, choose some. Ends with 1 if a module differs in silence,
or is refused without a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.common import Row, parser, report
from benchmarks.traced.check import find
from benchmarks.traced.modules import subjects

COLUMNS = {"module": "", "layers": "d", "tied": "d", "verdict": "", "cuts": "", "seconds": ".1f", "where": ""}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("names", nargs="*", help="modules; none: all")
    arguments = made.parse_args()
    chosen = [subject for subject in subjects() if not arguments.names or _is_named(subject.name, arguments.names)]
    if unknown := [name for name in arguments.names if not any(_is_named(s.name, [name]) for s in chosen)]:
        made.error(f"there is no module {', '.join(unknown)} in benchmarks/traced")
    wrong = []
    torch.set_num_threads(1)

    def rows() -> Iterator[Row]:
        for subject in chosen[: 2 if arguments.quick else None]:
            found = find(subject)
            shown = {"module": subject.name, "verdict": found.verdict, "where": found.reason}
            cuts = "same bits" if found.cuts_differ == 0 else f"{found.cuts_differ:.0e}"
            yield {**vars(found), **shown, "cuts": cuts if found.layers else "", "verified": found.verified}
            if not found.right:
                wrong.append(subject.name)

    report(COLUMNS, rows(), arguments.output, notes)
    sys.exit(bool(wrong))


def _is_named(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name} ") for name in names)


def notes(rows: Sequence[Row]) -> list[str]:
    verified = [row for row in rows if row["verified"]]
    same = [row for row in verified if row["verdict"] == "same bits"]
    refused = [row for row in rows if row["verdict"] == "refused"]
    wrong = [f"{row['module']}: {row['verdict']}" for row in rows if row not in verified and row not in refused]
    return [
        f"equal: {len(verified)} of {len(rows)}, {len(same)} of them with the same bits as the module itself",
        f"refused with a line: {len(refused)}",
        *wrong,
    ]


if __name__ == "__main__":
    main()
