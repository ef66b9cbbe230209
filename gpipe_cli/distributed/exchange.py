"""Defines the exchange, a float64 vector that all workers add up once per step, and the tree over which workers meet.

Each slot of the vector is written by one worker and is 0 on the others. Adding zeros is exact, so every worker reads
the same bits, whatever K. Every decision taken from the sum (skip the update, stop, clip by this factor) is therefore
the same on all workers without another message.

Over the tree of ranks log2(W) messages go up to rank 0, and as many down again (docs/cluster.md has its seconds by
workers). The children of rank r are r + 1, r + 2, r + 4, … below r's lowest set bit: a subtree is a range of ranks, and
the ranks of one machine meet before they meet others. Plain messages: gloo's own sum goes round a ring of W ranks.
"""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import MESSAGE_TAGS

VALUES = MESSAGE_TAGS + 1  # message tag, beyond that of the exchange
TIMEOUT_OF_GROUP = timedelta(0)


def family(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Returns the parent of a rank (None of rank 0) and its children, in the tree of ``size`` ranks."""
    distances = (1 << bit for bit in range(((rank & -rank or size) - 1).bit_length()))
    return rank & (rank - 1) if rank else None, [rank + far for far in distances if rank + far < size]


class Tree:
    """Passes CPU tensors and bytes between this rank, its parent and its children.

    Args:
        group: all ranks; None when there is only one.
        tag: of the messages, whose order tells them apart.

    Attributes:
        parent: rank; None on rank 0.
        children: ranks, in order. The subtree of each ends where that of the next begins.
    """

    def __init__(self, group: dist.ProcessGroup | None, tag: int) -> None:
        self._group, self._tag = group, tag
        self.parent, self.children = (None, []) if group is None else family(group.rank(), group.size())

    def add_up(self, own: Tensor, timeout: timedelta = TIMEOUT_OF_GROUP) -> Tensor:
        """Returns the sum of all ranks' ``own``, on every rank, and uses ``own`` as memory meanwhile."""
        shares = [torch.empty_like(own) for _ in self.children]
        works = [self._receive(share, child) for share, child in zip(shares, self.children, strict=True)]
        for work, share in zip(works, shares, strict=True):
            work.wait(timeout)
            own += share
        total = own.clone()
        if self.parent is not None:
            answer = self._receive(total, self.parent)
            self._send([own], [self.parent], timeout)
            answer.wait(timeout)
        self._send([total], self.children, timeout)
        return total

    def gather(self, own: bytes) -> bytes:
        """Returns on rank 0 the ``own`` of all ranks, in their order, with commas between; elsewhere of its subtree."""
        content = b",".join([own, *(self._receive_bytes(child) for child in self.children)])
        if self.parent is not None:
            self._send(_packed(content), [self.parent])
        return content

    def spread(self, content: bytes) -> bytes:
        """Returns rank 0's ``content`` on every rank."""
        content = content if self.parent is None else self._receive_bytes(self.parent)
        self._send(_packed(content), self.children)
        return content

    def _receive_bytes(self, rank: int) -> bytes:
        size = torch.empty(1, dtype=torch.int64)
        self._receive(size, rank).wait()
        content = torch.empty(int(size), dtype=torch.uint8)
        self._receive(content, rank).wait()
        return content.numpy().tobytes()

    def _receive(self, tensor: Tensor, rank: int) -> dist.Work:
        work = dist.irecv(tensor, group_src=rank, group=self._group, tag=self._tag)
        assert work is not None  # torch returns None to ranks outside the group; here every rank is inside
        return work

    def _send(self, tensors: list[Tensor], ranks: list[int], timeout: timedelta = TIMEOUT_OF_GROUP) -> None:
        """Sends to the last rank first: its subtree is the deepest."""
        pairs = [(rank, tensor) for rank in reversed(ranks) for tensor in tensors]
        for work in [dist.isend(tensor, group_dst=rank, group=self._group, tag=self._tag) for rank, tensor in pairs]:
            assert work is not None
            work.wait(timeout)


def _packed(content: bytes) -> list[Tensor]:
    """Returns the number of bytes, and the bytes."""
    return [torch.tensor([len(content)]), torch.frombuffer(bytearray(content), dtype=torch.uint8)]


# -- a vector of numbers -----------------------------------------------------------------------------------------------


class StopRequested(Exception):
    """Raised on all workers at the same place when an evaluation ends early because the run was asked to stop."""


class Exchange:
    """Sums a vector of named fields over all workers.

    Args:
        fields: number of slots by name; the same on every worker.
        group: all workers, for CPU tensors; None when there is only one worker.

    Attributes:
        own: by field, the slots that this worker writes before `run`.
        total: by field, the sums of the last `run`.
        ended_at: when `run` last ended, in seconds of `time.perf_counter`; about the same moment on all workers.
    """

    def __init__(self, fields: Mapping[str, int], group: dist.ProcessGroup | None) -> None:
        self._tree = Tree(group, MESSAGE_TAGS)  # beyond the tags of the pipeline's transport
        self._sizes = list(fields.values())
        self._vector = torch.zeros(sum(self._sizes), dtype=torch.float64)
        self.own: dict[str, Tensor] = dict(zip(fields, torch.split(self._vector, self._sizes), strict=True))
        self.total: dict[str, Tensor] = {name: tensor.clone() for name, tensor in self.own.items()}
        self.ended_at = time.perf_counter()

    def run(self, timeout: timedelta = TIMEOUT_OF_GROUP) -> None:
        """Sums ``own`` of all workers into ``total`` and sets ``own`` to 0; every worker calls it at the same time."""
        total = self._tree.add_up(self._vector, timeout)
        self.total = dict(zip(self.own, torch.split(total, self._sizes), strict=True))
        self._vector.zero_()
        self.ended_at = time.perf_counter()


# -- values as JSON: what comes over a process group is never unpickled ------------------------------------------------


def all_gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns every worker's ``value`` on all workers, in the group's order, as JSON keeps it: tuples become lists.

    Args:
        group: for CPU tensors; None when there is only one worker.

    Raises:
        ValueError: what arrives is no JSON.
    """
    tree = Tree(group, VALUES)
    return list(json.loads(b"[%b]" % tree.spread(tree.gather(json.dumps(value).encode()))))


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns every rank's value on rank 0, as `all_gather_json` does on all; an empty list elsewhere."""
    tree = Tree(group, VALUES)
    everyone = tree.gather(json.dumps(value).encode())
    return json.loads(b"[%b]" % everyone) if tree.parent is None else []


def broadcast_json(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Returns rank 0's ``value`` on all workers; arguments and errors as of `all_gather_json`."""
    return json.loads(Tree(group, VALUES).spread(json.dumps(value).encode()))
