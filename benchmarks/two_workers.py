"""Real compute: two workers with one thread each against a plain loop of one process with the same micro-batches.

The layers are equal residual feed-forward blocks, half of them on each worker; nothing is re-materialized, on either
side. The best that a pipeline of two cells can do is 2M/(M+1) times the plain loop. How much of that two busy cores of
one machine allow at all (shared caches, memory, clock) is measured too: both workers run a plain loop over their own
half at the same time, without messages, and the column `machine` is the speed-up of a perfect pipeline made of that.

plain: forward and backward of each micro-batch in turn, one graph at a time. With schedule 1f1b a worker keeps at most
two graphs; with gpipe it keeps those of all M micro-batches, so its backwards find in memory what the plain loop's find
in the cache. To tell that price of the order from the engine's own, `same order` is a plain loop on one process in the
schedule's order: for gpipe all M forwards, then the backwards in reverse; for 1f1b the plain loop itself. The speed-up
as a share of 2M/(M+1) is shown twice: `share` is against the plain loop, `share, same order` against that one.

The contenders take turns; each figure is the median over the repetitions.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Report, parser, seconds_in_turns
from gpipe_cli.bench.driver import Block, Step, engine_step, plain_step
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.context import Context

TOKENS = 32  # of an example
SAME_ORDER = {"gpipe": "plain, same order", "1f1b": "plain"}  # the plain loop in the order of each kind of schedule


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
    steps: dict[str, Step] = {"halves": plain_step(half, hidden)}
    for kind, name in SAME_ORDER.items():
        steps[name] = plain_step(blocks, parts, kind=kind) if rank == 0 else lambda: None
        steps[kind] = engine_step(half, rank, 2, parts, kind)
    return seconds_in_turns({name: partial(timed, step, blocks) for name, step in steps.items()}, config["repetitions"])


def timed(step: Step, blocks: list[Block]) -> float:
    """Seconds until the slower worker has ended; both begin together."""
    for block in blocks:
        block.zero_grad()
    dist.barrier()
    began = time.perf_counter()
    step()
    taken = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def row(kind: str, M: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    plain, same_order, halves, step = (
        statistics.median(seconds[name]) for name in ("plain", SAME_ORDER[kind], "halves", kind)
    )
    ideal, machine = 2 * M / (M + 1), plain / (halves * (M + 1) / M)
    return {
        "M": M,
        "schedule": kind,
        "plain, s": plain,
        "same order, s": same_order,
        "step, s": step,
        "speed-up": plain / step,
        "2M/(M+1)": ideal,
        "share": plain / step / ideal,
        "share, same order": same_order / step / ideal,
        "machine": machine,
        "share of machine": plain / step / machine,
        "seconds": seconds,
    }


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
    columns = {"M": "d", "schedule": "", "plain, s": ".3f", "same order, s": ".3f", "step, s": ".3f"}
    columns |= {"speed-up": ".3f", "2M/(M+1)": ".3f", "share": ".3f", "share, same order": ".3f"}
    report = Report({**columns, "machine": ".3f", "share of machine": ".3f"})
    report.begin()
    for M in arguments.M:
        sizes = {"layers": arguments.layers, "width": arguments.width, "examples": arguments.examples}
        config = {**sizes, "M": M, "repetitions": arguments.repetitions}
        seconds = run_workers("benchmarks.two_workers:worker", 2, config)
        for kind in SAME_ORDER:
            report.add(row(kind, M, seconds))
    notes = []
    for column, against in (("share", "the plain loop"), ("share, same order", "that of the same order")):
        lowest = min(report.rows, key=lambda row: row[column])
        place = f"M={lowest['M']} {lowest['schedule']}"
        notes.append(f"lowest share of 2M/(M+1) against {against}: {lowest[column]:.3f} at {place}")
    report.end(arguments.output, notes)


if __name__ == "__main__":
    main()
