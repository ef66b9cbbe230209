"""Lists the pipelines that a search tries: kind, cells a worker, replicas, micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ...config import PipelineConfig
from ...schedule.orders import KINDS, ROUND_ROBIN

FREE = ("K", "M", "schedule", "workers", "replicas", "partition", "remat")  # keys that a search may choose
ROUNDS = (2, 3, 4, 6, 8)  # cells a worker of round robin
SIDE_BY_SIDE = (1, 4)  # of the other kinds: smaller cells keep their graphs more finely
ALONE = (1, 2, 4, 8, 16)  # of a single worker


def candidates(
    pipeline: PipelineConfig, free: Collection[str], devices: int, layers: int, counts: Sequence[int]
) -> Iterator[PipelineConfig]:
    """Yields sections `pipeline` with other values of the keys in ``free``, those that recompute nothing.

    Args:
        devices: of all replicas together.
        layers: of the model.
        counts: micro-batches of all replicas together that a search may try.
    """
    replicas = [n for n in range(1, devices + 1) if devices % n == 0] if "replicas" in free else [pipeline.replicas]
    kinds = list(KINDS) if "schedule" in free else [pipeline.schedule]
    for copies, kind in product(replicas, kinds):
        workers = min(devices // copies, layers) if "workers" in free else pipeline.planned_workers
        if workers * copies != devices and "replicas" in free:
            continue  # devices without work
        for K in _cells(pipeline, kind, workers, layers) if "K" in free else [pipeline.K]:
            for M in [n // copies for n in counts if n % copies == 0] if "M" in free else [pipeline.M]:
                values: dict[str, Any] = {"K": K, "M": M, "schedule": kind, "workers": workers, "replicas": copies}
                if "partition" in free or "K" in free:
                    values["partition"] = "auto"
                if "remat" in free:
                    values |= {"remat": "never", "keep": None}
                yield replace(pipeline, **values)


def _cells(pipeline: PipelineConfig, kind: str, workers: int, layers: int) -> list[int]:
    """Returns the numbers of cells that are tried for a kind on so many workers."""
    if workers == 1:
        each: Sequence[int] = ALONE if kind == "1f1b" else ()  # every kind is the same there
    else:
        each = ROUNDS if kind in ROUND_ROBIN else SIDE_BY_SIDE
    return [workers * number for number in each if workers * number <= layers]
