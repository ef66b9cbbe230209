"""Times the trainer's exchange, which ends every step, the same by gloo, and gloo's all-reduce of 500 float64 numbers.

All workers are processes of this machine. Each round begins together and ends when the last worker has its result;
the median over the rounds is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.common import Row, parser, report
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.distributed.exchange import Exchange
from gpipe_cli.launch.context import Context

NUMBERS = 500


def worker(context: Context, config: dict[str, Any]) -> Row:
    """Returns the median milliseconds of a round of each kind."""
    context.init_process_group()
    gloo = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    exchange, by_gloo = (Exchange({"numbers": NUMBERS}, group) for group in (dist.group.WORLD, gloo))
    vector = torch.zeros(NUMBERS, dtype=torch.float64)
    return {
        "all_reduce by gloo, ms": median_ms(lambda: dist.all_reduce(vector, group=gloo), config["rounds"]),
        "exchange by gloo, ms": median_ms(by_gloo.run, config["rounds"]),
        "exchange, ms": median_ms(exchange.run, config["rounds"]),
    }


def median_ms(run: Callable[[], object], rounds: int) -> float:
    """Times each round's slowest worker from a barrier on.

    `StopWatch` sleeps until its start, and waking up takes too long for rounds as short as these.
    """
    taken = torch.zeros(rounds)
    for number in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        run()
        taken[number] = time.perf_counter() - began
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken[rounds // 10 :].median()) * 1000


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16], help="default: 2 4 8 16")
    options.add_argument("--rounds", type=int, default=100, help="default: 100")
    arguments = options.parse_args()
    rounds = min(arguments.rounds, 20) if arguments.quick else arguments.rounds

    def rows() -> Iterator[Row]:
        for workers in arguments.workers:
            yield {"workers": workers, **run_workers("benchmarks.exchange:worker", workers, {"rounds": rounds})}

    kinds = ("all_reduce by gloo, ms", "exchange by gloo, ms", "exchange, ms")
    report({"workers": "d", **dict.fromkeys(kinds, ".2f")}, rows(), arguments.output)


if __name__ == "__main__":
    main()
