"""Tests the tree of ranks: no rank is far from rank 0, and all read the bits that each has written."""

from __future__ import annotations

import pytest

from gpipe_cli.bench.workers import run_workers
from gpipe_cli.distributed.exchange import family


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 8, 9, 64, 100])
def test_each_rank_is_the_child_of_one_and_log2_messages_from_rank_0(size: int) -> None:
    parents = {child: rank for rank in range(size) for child in family(rank, size)[1]}
    assert parents == {rank: family(rank, size)[0] for rank in range(1, size)}

    def depth(rank: int) -> int:
        return 1 + depth(parents[rank]) if rank else 0

    assert max(map(depth, range(size))) <= (size - 1).bit_length()
    assert len(family(0, size)[1]) == (size - 1).bit_length()


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_every_rank_reads_what_each_has_written_in_their_order(backend: str) -> None:
    size = 6
    totals = [[*(0.1 * (rank + step) for rank in range(size)), size] for step in range(2)]
    gathered = [[rank] for rank in range(size)]
    expected = [[totals, [[] if rank else gathered, {"from": 0}]] for rank in range(size)]
    assert run_workers("group_jobs:meet", size, {"backend": backend}) == expected
