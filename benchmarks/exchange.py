"""The trainer's exchange, which ends every step, against gloo's all-reduce of the same 500 float64 numbers.

All workers are processes of this machine. Each round begins together; it counts until the last worker has its answer.
The median over the rounds is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Report, parser
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.distributed.exchange import Exchange
from gpipe_cli.launch.context import Context

NUMBERS = 500


def worker(context: Context, config: dict[str, Any]) -> dict[str, float]:
    """Entry point: median milliseconds of a round of each kind."""
    context.init_process_group("gloo")
    exchange = Exchange({"numbers": NUMBERS}, dist.group.WORLD)
    vector = torch.zeros(NUMBERS, dtype=torch.float64)
    return {
        "all_reduce": median_ms(lambda: dist.all_reduce(vector), config["rounds"]),
        "exchange": median_ms(exchange.run, config["rounds"]),
    }


def median_ms(run: Callable[[], object], rounds: int) -> float:
    """Of the rounds' slowest workers."""
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
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 20)
    report = Report({"workers": "d", "all_reduce, ms": ".2f", "exchange, ms": ".2f"})
    report.begin()
    for workers in arguments.workers:
        ms = run_workers("benchmarks.exchange:worker", workers, {"rounds": arguments.rounds})
        report.add({"workers": workers, "all_reduce, ms": ms["all_reduce"], "exchange, ms": ms["exchange"]})
    report.end(arguments.output)


if __name__ == "__main__":
    main()
