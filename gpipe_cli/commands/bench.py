"""gpipe-bench: measures one of the paper's tables here and sets the paper's figures beside it.

    gpipe-bench table=2 quick=true        throughput for K = 2, 4, 8 and M = 1, 4, 32, on emulated accelerators
    gpipe-bench table=3                   the same with slow links between the workers
    gpipe-bench table=4                   where a training step goes
    gpipe-bench table=1                   the largest models that fit

Prints a table and writes it, its figures and its plot: OUTPUT/tableN.html, .json, .svg. The keys:

    table=N                    1: largest models, 2: throughput, 3: over a slow link, 4: where a step goes
    quick=false                true: shorter steps, one repetition, fewer peers: a first impression in a minute or two
    output=bench               folder of the table, its figures as JSON and its plot

    models=amoebanet,transformer   families; the sizes are those of the paper's table
    K=2,4,8                    cells, one a worker; default: the paper's (2,4,8 in tables 2 and 3, 2 in table 4)
    M=1,4,32                   micro-batches; default: the paper's (1,4,32 in table 2, 32 in 3), 16 in table 4
    remat=always               always, except_last, never; the paper's accelerators always recompute
    schedules=gpipe,1f1b       the engine's; the first one is compared with the paper
    repetitions=3              timed steps of each contender, the median counts; quick: 1
    seconds=S                  sum of all layers in an emulated step; default: 1, 2, 6 for M=1, 4, 32; quick: a half
    realtime=false             true: the workers go before the machine's other processes (Linux, as root)

    device_flops=4.75e+12      FLOP/s of table 3's emulated device; half the fp32 peak of a P100, an assumption
    bandwidth=1e+10            bytes a second of its link, in either direction; about PCIe 3.0 with 16 lanes
    latency=1e-5               seconds that a message on that link takes beside the time of its bytes

    train=[model=amoebanet,lr_schedule=constant]   table 4: arguments of the measured run of gpipe-train
"""  # --help prints this

import sys
from collections.abc import Sequence

from gpipe_cli.benchmarks.tables.bench import measure_table, parse
from gpipe_cli.terminal.command import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 when a measurement failed, 2 for a wrong call."""
    return run_command("gpipe-bench", arguments, __doc__, lambda words: measure_table(parse(words)), needs_words=True)


if __name__ == "__main__":
    sys.exit(main())
