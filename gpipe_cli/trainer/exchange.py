"""The one meeting of all workers per step: a float64 vector, every slot filled by one worker, summed over all.

Adding zeros is exact, so every worker reads the same bits, whatever K, and every decision that follows from them (skip
the update, stop, clip by this factor) is the same everywhere without another message.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """A vector with named fields.

    Args:
        fields: name to number of slots; the same on every worker.
        group: a group of all workers that sums CPU tensors; None when there is only one worker.
    """

    def __init__(self, fields: Mapping[str, int], group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._sizes = list(fields.values())
        self._mine = torch.zeros(sum(self._sizes), dtype=torch.float64)
        self.mine: dict[str, Tensor] = dict(zip(fields, self._mine.split(self._sizes), strict=True))
        self.all: dict[str, Tensor] = {name: tensor.clone() for name, tensor in self.mine.items()}

    def run(self) -> None:
        """Sums what every worker wrote into ``mine`` to everybody's ``all``, and clears ``mine``."""
        total = self._mine.clone()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        self.all = dict(zip(self.mine, total.split(self._sizes), strict=True))
        self._mine.zero_()
