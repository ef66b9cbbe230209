"""Real compute: two workers with one thread each against a plain loop of one process with the same micro-batches.

The layers are equal residual feed-forward blocks, half of them on each worker; nothing is re-materialized, on either
side. The best that a pipeline of two cells can do is 2M/(M+1) times the plain loop. How much of that two busy cores of
one machine allow at all (shared caches, memory, clock) is measured too: both workers run a plain loop over their own
half at the same time, without messages, and the column `machine` is the speed-up of a perfect pipeline made of that.

The contenders take turns; each figure is the median over the repetitions.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Report, parser
from gpipe_cli.bench.driver import Block, Step, engine_step, plain_step
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.context import Context

TOKENS = 32  # of an example
NAMES = ("plain", "halves", "gpipe", "1f1b")


def worker(context: Context, config: dict[str, Any]) -> dict[str, list[float]]:
    """Entry point: seconds of every repetition by contender."""
    context.init_process_group("gloo")
    rank, width, M = context.rank, config["width"], config["M"]
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(config["layers"])]
    half = blocks[rank * len(blocks) // 2 : (rank + 1) * len(blocks) // 2]
    batch = torch.randn(config["examples"], TOKENS, width)
    parts = [((rows,), (rows,)) for rows in batch.tensor_split(M)]
    hidden = [((rows.clone().requires_grad_(rank > 0),), (rows,)) for rows in batch.tensor_split(M)]
    steps: dict[str, Step] = {
        "plain": plain_step(blocks, parts) if rank == 0 else lambda: None,
        "halves": plain_step(half, hidden),
        "gpipe": engine_step(half, rank, 2, parts, "gpipe"),
        "1f1b": engine_step(half, rank, 2, parts, "1f1b"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for repetition in range(config["repetitions"] + 1):
        for name in NAMES:
            taken = timed(steps[name])
            if repetition:
                seconds[name].append(taken)
            for block in blocks:
                block.zero_grad()
    return seconds


def timed(step: Step) -> float:
    """Seconds until the slower worker has ended; both begin together."""
    dist.barrier()
    began = time.perf_counter()
    step()
    taken = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--M", type=int, nargs="+", default=[2, 4, 8, 16], help="default: 2 4 8 16")
    options.add_argument("--width", type=int, default=512, help="of the layers (default: 512)")
    options.add_argument("--layers", type=int, default=16, help="an even number (default: 16)")
    options.add_argument("--examples", type=int, default=32, help="of 32 tokens, in a mini-batch (default: 32)")
    options.add_argument("--repetitions", type=int, default=5, help="of every contender (default: 5)")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.M, arguments.repetitions = [4], 3
    report = Report(
        {"M": "d", "schedule": "", "plain, s": ".3f", "step, s": ".3f", "speed-up": ".3f", "2M/(M+1)": ".3f"}
        | {"share": ".3f", "machine": ".3f", "share of machine": ".3f"}
    )
    report.begin()
    for M in arguments.M:
        sizes = {"layers": arguments.layers, "width": arguments.width, "examples": arguments.examples}
        config = {**sizes, "M": M, "repetitions": arguments.repetitions}
        seconds = run_workers("benchmarks.two_workers:worker", 2, config)
        plain, halves = statistics.median(seconds["plain"]), statistics.median(seconds["halves"])
        ideal, possible = 2 * M / (M + 1), plain / (halves * (M + 1) / M)
        for kind in ("gpipe", "1f1b"):
            step = statistics.median(seconds[kind])
            figures = {"plain, s": plain, "step, s": step, "speed-up": plain / step, "2M/(M+1)": ideal}
            shares = {"share": plain / step / ideal, "machine": possible, "share of machine": plain / step / possible}
            report.add({"M": M, "schedule": kind, **figures, **shares, "seconds": seconds})
    lowest = min(report.rows, key=lambda row: row["share"])
    report.end(arguments.output, [f"lowest share of 2M/(M+1): {lowest['share']:.3f} at M={lowest['M']}"])


if __name__ == "__main__":
    main()
