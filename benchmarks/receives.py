"""Simulates what messages cost between GPUs: if they travel at any time, as posted when sent, and as posted early.

Steps of eight workers with 32 micro-batches and without recompute, as multiples of the step whose messages are free. A
message takes c forwards of a cell, a backward two; `interleaved_1f1b` has two such cells a worker. No GPU is used.

    python -m benchmarks.receives
"""

from gpipe_cli.config import ROUND_ROBIN
from gpipe_cli.schedule.early import post_early
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.posting import post_when_sent
from gpipe_cli.schedule.schedule import kept_graphs, schedule
from gpipe_cli.schedule.simulate import cost_durations, simulate

WORKERS, M, TRANSFERS = 8, 32, (0.1, 0.25, 0.45)


def main() -> None:
    """Prints one line for each kind of schedule."""
    print(f"c = {', '.join(map(str, TRANSFERS))}:    free at any time | posted when sent | posted early")
    for kind in KINDS:
        placement = tuple(range(WORKERS)) * (2 if kind in ROUND_ROBIN else 1)
        lists = schedule(kind, placement, M, kept_graphs("never", len(placement), M))
        durations = cost_durations([1.0] * len(placement))
        best = simulate(lists, placement, durations).span
        columns = []
        for posts in (None, post_when_sent(lists), post_early(lists)):
            steps = (simulate(lists, placement, durations, c, posts=posts).span for c in TRANSFERS)
            columns.append(" ".join(f"{step / best:.3f}" for step in steps))
        print(f"{kind:<18}", " | ".join(columns))


if __name__ == "__main__":
    main()
