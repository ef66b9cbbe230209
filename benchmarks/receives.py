"""Simulates what messages cost between GPUs: if they travel at any time, as posted when sent, and as posted early.

Steps of eight workers with 32 micro-batches and without recompute, as multiples of the step whose messages are free. A
message takes c forwards of a cell, a backward two; `interleaved_1f1b` has two such cells a worker. No GPU is used.

    python -m benchmarks.receives
"""

from collections.abc import Callable
from typing import Any

from benchmarks.common import Row, parser, report
from gpipe_cli.benchmarks.tables.throughput import cost_durations
from gpipe_cli.config import ROUND_ROBIN
from gpipe_cli.schedule.early import post_early
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.posting import post_when_sent
from gpipe_cli.schedule.schedule import kept_graphs, schedule
from gpipe_cli.schedule.simulate import simulate

WORKERS, M, TRANSFERS = 8, 32, (0.1, 0.25, 0.45)
POSTS: dict[str, Callable[[Any], Any]] = {
    "free at any time": lambda lists: None,
    "posted when sent": post_when_sent,
    "posted early": post_early,
}


def measured(kind: str) -> Row:
    """Returns the steps of one kind of schedule for each way of posting, a number for each transfer."""
    placement = tuple(range(WORKERS)) * (2 if kind in ROUND_ROBIN else 1)
    lists = schedule(kind, placement, M, kept_graphs("never", len(placement), M))
    durations = cost_durations([1.0] * len(placement))
    best, row = simulate(lists, placement, durations).span, {"schedule": kind}
    for name, post in POSTS.items():
        posts = post(lists)
        steps = (simulate(lists, placement, durations, c, posts=posts).span for c in TRANSFERS)
        row[name] = " ".join(f"{step / best:.3f}" for step in steps)
    return row


def main() -> None:
    arguments = parser(__doc__).parse_args()
    notes = [f"for c = {', '.join(map(str, TRANSFERS))}"]
    kinds = KINDS if not arguments.quick else list(KINDS)[:1]
    report(dict.fromkeys(("schedule", *POSTS), ""), map(measured, kinds), arguments.output, lambda rows: notes)


if __name__ == "__main__":
    main()
