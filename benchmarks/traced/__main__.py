"""Traces every family of torchvision's classification models, and architectures of the transformers library.

Each becomes a list of layers, is cut into K = 1, 2 and 4 cells and takes a step with and without re-materialization;
gradients and loss are compared by name with those of the module itself by torch's own autograd. Names of modules on the
command line choose some; --parts N --part P divides the list among processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.common import Row, parser, report
from benchmarks.traced.check import find
from benchmarks.traced.modules import subjects

COLUMNS = {"module": "", "layers": "d", "tied": "d", "difference": "", "cuts": "", "seconds": ".1f", "where": ""}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("names", nargs="*", help="modules; none: all")
    made.add_argument("--parts", type=int, default=1)
    made.add_argument("--part", type=int, default=0)
    arguments = made.parse_args()
    if unknown := set(arguments.names) - {subject.name for subject in subjects()}:
        made.error(f"there is no module {', '.join(sorted(unknown))} in benchmarks/traced/modules.py")
    torch.set_num_threads(1)

    def rows() -> Iterator[Row]:
        chosen = [subject for subject in subjects() if not arguments.names or subject.name in arguments.names]
        for subject in chosen[arguments.part :: arguments.parts][: 2 if arguments.quick else None]:
            found = find(subject)
            yield {
                "module": subject.name,
                "layers": found.layers,
                "tied": found.tied,
                "difference": "same bits" if found.difference == 0 else f"{found.difference:.0e}",
                "cuts": "same bits" if found.cuts_differ == 0 else f"{found.cuts_differ:.0e}",
                "seconds": found.seconds,
                "where": found.reason,
                "verified": found.verified,
            }

    report(COLUMNS, rows(), arguments.output, notes)


def notes(rows: Sequence[Row]) -> list[str]:
    verified = [row for row in rows if row["verified"]]
    same = [row for row in verified if row["difference"] == "same bits"]
    return [f"verified: {len(verified)} of {len(rows)}, {len(same)} of them with the same bits as the module itself"]


if __name__ == "__main__":
    main()
