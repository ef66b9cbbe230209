"""A message between two workers of this machine: through memory that they share, and through gloo (TCP).

Worker 0 sends to worker 1, the others only take part in the barriers between. It rests 2 ms before a message, as if it
had computed, so caches are cold. host: what a send or a receive keeps its own worker from computing, mean of both.
latency: from the end of the sender's call to the moment at which the receiver has a message of 72 bytes. rate: of one
of 8 MB, what is copied on both sides included.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Report, parser
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.context import Context
from gpipe_cli.pipeline.transport import connect_workers
from gpipe_cli.planner.measure.link import LinkTimes, measure_link

CPU = torch.device("cpu")
WIRES = {"shared memory": True, "gloo": False}


def worker(context: Context, config: dict[str, Any]) -> dict[str, list[LinkTimes]]:
    """Entry point: for each wire what a message took, in every round; the wires take turns."""
    context.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    ranks = tuple(range(context.world_size))
    wires = {name: connect_workers(ranks, CPU, CPU, (world, world), world, shared) for name, shared in WIRES.items()}
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
    if arguments.quick:
        arguments.rounds = 2
    report = Report({"workers": "d", "wire": "", "host, ms": ".3f", "latency, ms": ".3f", "rate, GB/s": ".1f"})
    report.begin()
    for workers in arguments.workers:
        answer = run_workers("benchmarks.messages:worker", workers, {"rounds": arguments.rounds})
        for name, rounds in answer.items():
            host, latency, rate = (float(torch.tensor(values).median()) for values in zip(*rounds, strict=True))
            times = {"host, ms": 1e3 * host, "latency, ms": 1e3 * latency, "rate, GB/s": rate / 1e9}
            report.add({"workers": workers, "wire": name, **times})
    report.end(arguments.output)


if __name__ == "__main__":
    main()
