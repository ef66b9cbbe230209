"""Measures a worker's activation memory, counted to the byte, against the paper's N + (L/K)·(N/M).

Counted is every tensor that the step keeps: the tensors that autograd saves for backward, the boundary inputs that the
engine keeps for recompute, gradients between cells, messages that are posted or being sent. Neither weights nor their
gradients nor the caller's mini-batch count. The count is taken whenever autograd saves something; its highest value of
all workers is shown; buffers that an operation needs only while it runs are not in it. Added are the slots of memory
that the worker shares with the receivers of its messages, in whole pages.

The formula, in bytes: N is the boundary of the whole mini-batch, and one layer's share of N/M is what the graph of that
layer keeps for one micro-batch, measured by itself. With remat=never the formula is N·L/K: nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import Row, parser, report
from gpipe_cli.bench.steps import cpu_transport, engine_step, make_cell, squared_loss
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.planner.measure.tracking import Tracker

LAYERS, WIDTH, TOKENS = 16, 16, 8
EXAMPLES = 2048  # of the mini-batch


class Block(nn.Module):
    """Maps x [b, t, width] to x + a feed-forward branch four times as wide; costs the same in every place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))  # type: ignore[no-any-return]


@contextmanager
def counted(known: Sequence[Tensor]) -> Iterator[tuple[Tracker, list[int]]]:
    """Yields a counter of the bytes of tensors made inside, and its counts whenever autograd saves one.

    Args:
        known: existing tensors, which do not count.
    """
    tracker, counts = Tracker(), [0]
    tracker.ignore(known)

    def save(tensor: Tensor) -> Tensor:
        counts.append(tracker.now)
        return tensor.detach()

    with tracker, torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept):
        yield tracker, counts


def sum_of_squares(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
    return squared_loss(outputs, (torch.zeros_like(outputs[0]),))


def worker(context: Context, config: dict[str, Any]) -> list[int]:
    """Returns the highest count of any worker, for each setting."""
    context.init_process_group()
    return [highest(M, remat, context.rank, context.world_size) for M, remat in config["settings"]]


def highest(M: int, remat: str, rank: int, K: int) -> int:
    """Returns the most bytes that a step keeps on any worker."""
    modules = [Block(WIDTH) for _ in range(LAYERS // K)]
    shape = (EXAMPLES // M, TOKENS, WIDTH)
    micro_batches: list[MicroBatch] = [((torch.randn(shape),), (torch.zeros(1),)) for _ in range(M)]
    placement = tuple(range(K))
    transport = cpu_transport(placement)
    cell = make_cell(rank, modules)
    step = engine_step([cell], placement, rank, transport, micro_batches, "gpipe", remat, sum_of_squares)
    step()  # the first step exchanges the shapes of messages
    dist.barrier()
    known = [kept for module in modules for weight in module.parameters() for kept in (weight, weight.grad)]
    known += [tensor for inputs, targets in micro_batches for tensor in inputs + targets] if rank == 0 else []
    with counted([tensor for tensor in known if tensor is not None]) as (_, counts):
        step()
    most = torch.tensor([max(counts) + getattr(transport, "bytes_shared", 0)])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def formula(K: int, M: int, remat: str) -> float:
    """Returns N·L/K without re-materialization, N + (L/K)·(N/M) with it, in bytes."""
    x, layer = torch.randn(EXAMPLES, TOKENS, WIDTH, requires_grad=True), Block(WIDTH)
    with counted([x, *layer.parameters()]) as (tracker, _):
        y = layer(x)  # the next layer's input: its bytes are this layer's
        kept = tracker.now
        del y
    boundary = EXAMPLES * TOKENS * WIDTH * 4
    return kept * LAYERS / K if remat == "never" else boundary + kept * LAYERS / K / M


def main() -> None:
    arguments = parser(__doc__).parse_args()
    sizes = ([1, 4], [4]) if arguments.quick else ([1, 2, 4, 8], [1, 4, 32])
    settings = [(M, remat) for remat in ("never", "except_last", "always") for M in sizes[1]]

    def rows() -> Iterator[Row]:
        for K in sizes[0]:
            found = run_workers("benchmarks.memory:worker", K, {"settings": settings})
            for (M, remat), measured in zip(settings, found, strict=True):
                expected = formula(K, M, remat)
                kib = {"measured, KiB": measured / 1024, "formula, KiB": expected / 1024}
                yield {"K": K, "M": M, "remat": remat, **kib, "ratio": measured / expected}

    columns = {"K": "d", "M": "d", "remat": "", "measured, KiB": ",.1f", "formula, KiB": ",.1f", "ratio": ".2f"}
    report(columns, rows(), arguments.output)


if __name__ == "__main__":
    main()
