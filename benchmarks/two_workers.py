"""Real compute: two workers with one thread each against a plain loop of one process with the same micro-batches.

The layers are equal residual feed-forward blocks, half of them on each worker; nothing is re-materialized, on either
side. The best that a pipeline of two cells can do is 2M/(M+1) times the plain loop, on a machine with two whole cores.
A virtual machine, or a busy one, has them at some moments and at others not, so the contenders take turns in short
rounds, and each round says how much of two cores there was: both workers run a plain loop over their own half, one
after the other and then together, without messages. `cores` is the first time over the second, of 2 at most.

share: speed-up over 2M/(M+1), the median of all rounds. whole: how many rounds had two whole cores right before and
right after the pipeline's step (together no more than 3 % slower than alone). share, whole: the median of those.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Report, parser, seconds_in_turns
from gpipe_cli.bench.driver import Block, Step, engine_step, plain_step
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.context import Context

TOKENS = 32  # of an example
KINDS = ("gpipe", "1f1b")
WHOLE = 0.97  # of two cores


def worker(context: Context, config: dict[str, Any]) -> dict[str, list[float]]:
    """Entry point: seconds of every round by contender."""
    context.init_process_group("gloo")
    rank, width, M = context.rank, config["width"], config["M"]
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(config["layers"])]
    half = blocks[rank * len(blocks) // 2 : (rank + 1) * len(blocks) // 2]
    batch = torch.randn(M * config["examples"], TOKENS, width)
    micro_batches = [((rows,), (rows,)) for rows in batch.tensor_split(M)]
    hidden = [((rows.clone().requires_grad_(rank > 0),), (rows,)) for rows in batch.tensor_split(M)]
    own_half = plain_step(half, hidden)

    def alone(turn: int) -> Step:
        return own_half if rank == turn else idle

    steps: dict[str, Step] = {"plain": plain_step(blocks, micro_batches) if rank == 0 else idle}
    steps |= {"alone 0": alone(0), "alone 1": alone(1), "together 0": own_half}
    for number, kind in enumerate(KINDS, start=1):
        steps |= {kind: engine_step(half, rank, 2, micro_batches, kind), f"together {number}": own_half}
    return seconds_in_turns({name: partial(timed, step, blocks) for name, step in steps.items()}, config["rounds"])


def idle() -> None:
    """The other worker's turn."""


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
    """Of one schedule; every list in ``seconds`` has the rounds in the same order."""
    ideal = 2 * M / (M + 1)
    one_by_one = [first + second for first, second in zip(seconds["alone 0"], seconds["alone 1"], strict=True)]
    number = KINDS.index(kind)
    before, after = seconds[f"together {number}"], seconds[f"together {number + 1}"]
    cores = [alone / max(both) for alone, *both in zip(one_by_one, before, after, strict=True)]
    shares = [plain / step / ideal for plain, step in zip(seconds["plain"], seconds[kind], strict=True)]
    whole = [share for share, available in zip(shares, cores, strict=True) if available >= 2 * WHOLE]
    plain, step = statistics.median(seconds["plain"]), statistics.median(seconds[kind])
    return {
        "M": M,
        "schedule": kind,
        "plain, s": plain,
        "step, s": step,
        "speed-up": plain / step,
        "2M/(M+1)": ideal,
        "share": statistics.median(shares),
        "cores": statistics.median(cores),
        "whole": len(whole),
        "share, whole": statistics.median(whole) if whole else None,
        "seconds": seconds,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--M", type=int, nargs="+", default=[2, 4, 8, 16], help="default: 2 4 8 16")
    options.add_argument("--width", type=int, default=128, help="of the layers (default: 128)")
    options.add_argument("--layers", type=int, default=16, help="an even number (default: 16)")
    options.add_argument("--examples", type=int, default=16, help="of 32 tokens, in a micro-batch (default: 16)")
    options.add_argument("--rounds", type=int, default=30, help="one turn of every contender in each (default: 30)")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.M, arguments.rounds = [4], 5
    columns = {"M": "d", "schedule": "", "plain, s": ".3f", "step, s": ".3f", "speed-up": ".3f", "2M/(M+1)": ".3f"}
    report = Report({**columns, "share": ".3f", "cores": ".2f", "whole": "d", "share, whole": ".3f"})
    report.begin()
    sizes = {"layers": arguments.layers, "width": arguments.width, "examples": arguments.examples}
    for M in arguments.M:
        config = {**sizes, "M": M, "rounds": arguments.rounds}
        seconds = run_workers("benchmarks.two_workers:worker", 2, config)
        for kind in KINDS:
            report.add(row(kind, M, seconds))
    report.end(arguments.output, [lowest(report.rows, "share"), lowest(report.rows, "share, whole")])


def lowest(rows: Sequence[dict[str, Any]], column: str) -> str:
    """A note."""
    known = [row for row in rows if row[column] is not None]
    if not known:
        return f"{column}: no round had two whole cores"
    worst = min(known, key=lambda row: row[column])
    return f"{column}: at least {worst[column]:.3f} of 2M/(M+1), at M={worst['M']} {worst['schedule']}"


if __name__ == "__main__":
    main()
