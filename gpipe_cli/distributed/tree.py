"""Defines the tree of ranks over which all of them meet: log2(W) messages up to rank 0, and as many down again.

The children of rank r are r + 1, r + 2, r + 4, … below r's lowest set bit: a subtree is a range of ranks, and the ranks
of one machine meet before they meet others. Plain messages: gloo's own sum goes round a ring of W ranks.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

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
