"""Times messages between workers of this machine and the exchange that ends a step, by shared memory and by gloo.

Worker 0 sends to worker 1 after a rest of 2 ms, as if it had computed, so caches are cold. host: how long a send or a
receive keeps its own worker from computing, mean of both. latency: from the end of the sender's call to the moment at
which the receiver has a message of 72 bytes. rate: bytes per second of a message of 8 MB, copying on both sides
included. exchange: all workers sum 500 float64 numbers, from a barrier until the last one has the result; all_reduce:
the same by torch's own. All are medians over the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Row, parser, report
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.distributed.exchange import Exchange
from gpipe_cli.launch.context import Context
from gpipe_cli.pipeline.messages.transport import connect_workers
from gpipe_cli.planner.measure.link import measure_link

CPU = torch.device("cpu")
NUMBERS = 500
EXCHANGES = 14  # in each round


def worker(context: Context, config: dict[str, Any]) -> list[Row]:
    """Returns a row for each wire."""
    context.init_process_group()
    return [measure(context, wire, group, config["rounds"]) for wire, group in groups().items()]


def groups() -> dict[str, Any]:
    return {"shared memory": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}


def measure(context: Context, wire: str, group: Any, rounds: int) -> Row:
    transport = connect_workers(tuple(range(context.world_size)), CPU, CPU, (group, group), group)
    links = [measure_link(transport, context.rank) for _ in range(rounds)]
    host, latency, rate = (median(values) for values in zip(*links, strict=True))
    row: Row = {"wire": wire, "host, ms": 1e3 * host, "latency, ms": 1e3 * latency, "rate, GB/s": rate / 1e9}
    reduce = partial(dist.all_reduce, torch.zeros(NUMBERS, dtype=torch.float64), group=group)
    row["exchange, ms"] = median_ms(Exchange({"numbers": NUMBERS}, group).run, EXCHANGES * rounds)
    return row | {"all_reduce, ms": median_ms(reduce, EXCHANGES * rounds) if wire == "gloo" else None}


def median_ms(run: Callable[[], object], rounds: int) -> float:
    """Times each round's slowest worker; the first tenth of the rounds does not count."""
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
    options.add_argument("--workers", type=int, nargs="+", default=[2, 8], help="default: 2 8")
    arguments = options.parse_args()

    def rows() -> Iterator[Row]:
        for workers in arguments.workers:
            config = {"rounds": 1 if arguments.quick else 7}
            for row in run_workers("benchmarks.messages:worker", workers, config):
                yield {"workers": workers, **row}

    columns = {"workers": "d", "wire": "", "host, ms": ".3f", "latency, ms": ".3f", "rate, GB/s": ".1f"}
    report(columns | {"exchange, ms": ".2f", "all_reduce, ms": ".2f"}, rows(), arguments.output)


if __name__ == "__main__":
    main()
