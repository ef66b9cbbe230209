"""Traces architectures of torchvision and the transformers library, and compares each with itself.

Each becomes a list of layers, which is compared by name with the module itself, run whole by torch's own autograd:
outputs, gradients and buffers, in training and in evaluation, before and after updates of all weights. Then the layers
are cut into K = 1, 2 and 4 cells, and take a step with and without re-materialization. All must have the same bits.
Names of modules on the command line choose others. Ends with 1 if a module differs or is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.common import Row, parser, report
from benchmarks.traced.check import COLUMNS, find
from benchmarks.traced.modules import NAMES, subject


def main() -> None:
    made = parser(__doc__)
    made.add_argument("names", nargs="*", help="of modules in either library; default: one of each kind")
    arguments = made.parse_args()
    names = (arguments.names or NAMES)[: 2 if arguments.quick else None]
    torch.set_num_threads(1)
    verified = []

    def rows() -> Iterator[Row]:
        for name in names:
            found = find(subject(name))
            verified.append(found.verified)
            yield found.row(name)

    report(COLUMNS, rows(), arguments.output, lambda rows: [f"verified: {sum(verified)} of {len(rows)}"])
    sys.exit(not all(verified))


if __name__ == "__main__":
    main()
