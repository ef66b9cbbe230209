"""Times a message between two workers of this machine, through memory that they share and through gloo (TCP).

Worker 0 sends to worker 1; the others only take part in the barriers between. It rests 2 ms before a message, as if it
had computed, so caches are cold. host: how long a send or a receive keeps its own worker from computing, mean of both.
latency: from the end of the sender's call to the moment at which the receiver has a message of 72 bytes. rate: bytes
per second of a message of 8 MB, copying on both sides included.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Row, parser, report
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.context import Context
from gpipe_cli.pipeline.messages.transport import connect_workers
from gpipe_cli.planner.measure.link import LinkTimes, measure_link

CPU = torch.device("cpu")


def worker(context: Context, config: dict[str, Any]) -> dict[str, list[LinkTimes]]:
    """Returns what a message took on each wire, by round; the wires take turns."""
    context.init_process_group()
    ranks = tuple(range(context.world_size))
    groups: dict[str, Any] = {"shared memory": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    wires = {name: connect_workers(ranks, CPU, CPU, (group, group), group) for name, group in groups.items()}
    found: dict[str, list[LinkTimes]] = {name: [] for name in wires}
    for _ in range(config["rounds"]):
        for name, transport in wires.items():
            found[name].append(measure_link(transport, context.rank))
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[2, 8], help="default: 2 8")
    options.add_argument("--rounds", type=int, default=7, help="default: 7")
    arguments = options.parse_args()
    config = {"rounds": 2 if arguments.quick else arguments.rounds}

    def rows() -> Iterator[Row]:
        for workers in arguments.workers:
            for name, rounds in run_workers("benchmarks.messages:worker", workers, config).items():
                host, latency, rate = (median(values) for values in zip(*rounds, strict=True))
                times = {"host, ms": 1e3 * host, "latency, ms": 1e3 * latency, "rate, GB/s": rate / 1e9}
                yield {"workers": workers, "wire": name, **times}

    columns = {"workers": "d", "wire": "", "host, ms": ".3f", "latency, ms": ".3f", "rate, GB/s": ".1f"}
    report(columns, rows(), arguments.output)


if __name__ == "__main__":
    main()
