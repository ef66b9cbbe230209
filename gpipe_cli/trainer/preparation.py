"""Data are prepared before the first batch: by rank 0, then by the other workers that read them.

A large corpus takes hours, far longer than a message between workers may (`GROUP_TIMEOUT_SECONDS`), so here they wait
for one another with a patience of its own. Who dies is noticed at once all the same, by the closed connections.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ..data.source import Report, Source, no_report
from ..distributed.world import World

PATIENCE = timedelta(days=365)
ARRIVED, GO_ON = (1 << 30) + 2, (1 << 30) + 3  # message tags, beyond those of the exchange


def prepare_in_turn(source: Source | None, world: World, report: Report) -> None:
    """Rank 0 prepares, then the others find it prepared, unless their machine shares no disk with rank 0's.

    Every worker calls it at the same time; it returns when all are ready.

    Args:
        source: None on the workers that read no data.
        report: for rank 0, the only one that speaks.
    """
    prepare = getattr(source, "prepare", None)
    if prepare is not None and world.rank == 0:
        prepare(report)
    wait_for_everyone(world)
    if prepare is not None and world.rank != 0:
        prepare(no_report)
    wait_for_everyone(world)


def wait_for_everyone(world: World) -> None:
    """Returns when every worker has called it, however late the last one comes.

    By plain messages through rank 0: gloo's collectives take the group's timeout and no other.
    """
    if world.all_ranks is None:
        return
    if world.rank == 0:
        others = range(1, world.size)
        _wait([dist.irecv(torch.empty(1), other, group=world.all_ranks, tag=ARRIVED) for other in others])
        _wait([dist.isend(torch.zeros(1), other, group=world.all_ranks, tag=GO_ON) for other in others])
    else:
        answer = dist.irecv(torch.empty(1), 0, group=world.all_ranks, tag=GO_ON)
        _wait([dist.isend(torch.zeros(1), 0, group=world.all_ranks, tag=ARRIVED), answer])


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None  # torch gives None to ranks outside the group; here every rank is inside
        work.wait(PATIENCE)
