"""Traces architectures of torchvision and the transformers library, and compares each with itself.

Each becomes a list of layers, which is compared by name with the module itself, run whole by torch's own autograd:
outputs, gradients and buffers, in training and in evaluation, before and after a change of all weights. Then the layers
are cut into K = 1, 2 and 4 cells, on 1, 2 and 3 processes, and take a step with and without re-materialization. Each is
compared with a step of the module itself, and all must have the same bits.
Names of modules on the command line choose others. Ends with 1 if a module differs or is refused.
"""

from __future__ import annotations

import sys
from tempfile import TemporaryDirectory

from torch.multiprocessing.spawn import ProcessExitedException, spawn

from benchmarks.common import parser
from benchmarks.traced.check import PROCESSES, print_table
from benchmarks.traced.modules import NAMES


def main() -> None:
    made = parser(__doc__)
    made.add_argument("names", nargs="*", help="of modules in either library; default: one of each kind")
    arguments = made.parse_args()
    names = (arguments.names or NAMES)[: 2 if arguments.quick else None]
    with TemporaryDirectory() as folder:
        try:
            spawn(print_table, (folder, names, arguments.output), PROCESSES)  # type: ignore[no-untyped-call]  # torch's own
        except ProcessExitedException:  # the first has found a difference
            sys.exit(1)


if __name__ == "__main__":
    main()
