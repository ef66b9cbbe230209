"""Traces architectures of torchvision and the transformers library, and compares each with itself.

Each becomes a list of layers, which is compared by name with the module itself, run whole by torch's own autograd:
outputs, gradients and buffers, in training and in evaluation, before and after a change of all weights. Then the layers
are cut into K = 1, 2 and 4 cells and take a step with and without re-materialization: all must have the same bits.
Names of modules on the command line choose others. Ends with 1 if a module differs or is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.common import Row, parser, report
from benchmarks.traced.check import find
from benchmarks.traced.modules import NAMES, subject

COLUMNS = {"module": "", "layers": "d", "verdict": "", "cuts": "", "seconds": ".1f", "where": ""}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("names", nargs="*", help="of modules in either library; default: one of each kind")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    wrong = []

    def rows() -> Iterator[Row]:
        for name in (arguments.names or NAMES)[: 2 if arguments.quick else None]:
            found = find(subject(name))
            verdict = "DIFFERENT" if found.layers else "refused"
            if found.equal:
                verdict = f"{found.difference:.0e}" if found.difference else "same bits"
            cuts = "same bits" if found.same_cuts else "DIFFERENT"
            wrong.extend([] if found.verified else [name])
            yield {"module": name, **vars(found), "verdict": verdict, "cuts": cuts}

    report(COLUMNS, rows(), arguments.output, lambda rows: [f"verified: {len(rows) - len(wrong)} of {len(rows)}"])
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
