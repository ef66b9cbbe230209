"""Meets over the tree of all ranks, for test_tree.py."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist

from gpipe_cli.distributed.exchange import Exchange, all_gather_json, broadcast_json, gather_json
from gpipe_cli.launch.context import Context


def meet(context: Context, config: dict[str, Any]) -> list[Any]:
    """Entry point of a worker: returns every rank's totals of two exchanges, and what passed as JSON."""
    context.init_process_group(config["backend"])
    group, rank = cast(dist.ProcessGroup, dist.group.WORLD), context.rank
    exchange, totals = Exchange({"own": context.world_size, "all": 1}, group), []
    for step in range(2):
        exchange.own["own"][rank] = 0.1 * (rank + step)
        exchange.own["all"][0] = 1
        exchange.run()
        totals.append([*exchange.total["own"].tolist(), *exchange.total["all"].tolist()])
    passed = [gather_json([rank], group), broadcast_json({"from": rank}, group)]
    return all_gather_json([totals, passed], group)
