"""Measures real compute: two workers with one thread each against a plain loop of one process, same micro-batches.

The layers are equal residual feed-forward blocks, half of them on each worker; nothing is recomputed on either side.
A pipeline of two cells is at best 2M/(M+1) times as fast as the plain loop, on a machine with two whole cores. A
virtual machine, or a busy one, has them at some moments and not at others, so the contenders take turns in short
rounds, and each round measures how much of two cores there was: both workers run a plain loop over their own half, one
after the other and then together, without messages. `cores` is the first time over the second, at most 2.

share: speed-up over 2M/(M+1), the median of all rounds. whole: how many rounds had two whole cores right before and
right after the pipeline's step (together no more than 3 % slower than alone). share, whole: the median of those.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common import WARM_UP, Block, Row, parser, report
from gpipe_cli.bench.steps import Step, cpu_transport, engine_step, make_cell, plain_step, split
from gpipe_cli.bench.timing import StopWatch, take_turns
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.context import Context

TOKENS = 32  # of an example
KINDS = ("gpipe", "1f1b")
WHOLE = 0.97  # share of two cores from which on they count as whole


def worker(context: Context, config: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the seconds of every round by contender."""
    context.init_process_group()
    rank, width, M = context.rank, config["width"], config["M"]
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(config["layers"])]
    half = blocks[rank * len(blocks) // 2 : (rank + 1) * len(blocks) // 2]
    batch = torch.randn(M * config["examples"], TOKENS, width)
    micro_batches = split((batch, batch), M)
    hidden = [((rows.clone().requires_grad_(rank > 0),), (rows,)) for (rows,), _ in micro_batches]
    own_half = plain_step(half, hidden)

    def alone(turn: int) -> Step:
        return own_half if rank == turn else idle

    steps: dict[str, Step] = {"plain": plain_step(blocks, micro_batches) if rank == 0 else idle}
    steps |= {"alone 0": alone(0), "alone 1": alone(1), "together 0": own_half}
    for number, kind in enumerate(KINDS, start=1):
        step = engine_step([make_cell(rank, half)], (0, 1), rank, cpu_transport((0, 1)), micro_batches, kind)
        steps |= {kind: step, f"together {number}": own_half}

    def clear_gradients() -> None:
        for block in blocks:
            block.zero_grad()

    watch = StopWatch(rank, 2, clear_gradients)
    return take_turns({name: partial(watch.time, step) for name, step in steps.items()}, config["rounds"], WARM_UP)


def idle() -> None:
    """Does nothing, while the other worker has its turn."""


def row(kind: str, M: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Makes the row of one schedule; every list in ``seconds`` has the rounds in the same order."""
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
    sizes = {name: getattr(arguments, name) for name in ("layers", "width", "examples", "rounds")}

    def rows() -> Iterator[Row]:
        for M in arguments.M:
            seconds = run_workers("benchmarks.two_workers:worker", 2, {**sizes, "M": M})
            yield from (row(kind, M, seconds) for kind in KINDS)

    columns = {"M": "d", "schedule": "", "plain, s": ".3f", "step, s": ".3f", "speed-up": ".3f", "2M/(M+1)": ".3f"}
    columns |= {"share": ".3f", "cores": ".2f", "whole": "d", "share, whole": ".3f"}
    report(columns, rows(), arguments.output, lambda rows: [lowest(rows, "share"), lowest(rows, "share, whole")])


def lowest(rows: Sequence[Row], column: str) -> str:
    """Makes a note of the lowest figure in a column."""
    known = [row for row in rows if row[column] is not None]
    if not known:
        return f"{column}: no round had two whole cores"
    worst = min(known, key=lambda row: row[column])
    return f"{column}: at least {worst[column]:.3f} of 2M/(M+1), at M={worst['M']} {worst['schedule']}"


if __name__ == "__main__":
    main()
