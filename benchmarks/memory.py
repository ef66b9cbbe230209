"""Measures a worker's activation memory, counted to the byte, against the paper's N + (L/K)·(N/M).

Counted is every tensor that the step keeps: the tensors that autograd saves for backward (through saved-tensor hooks),
the boundary inputs that the engine keeps for recompute, gradients between cells, messages that are posted or being
sent. Each storage counts once; weights, their gradients and the caller's mini-batch do not count. The count is taken
whenever autograd saves something, and its highest value over all workers is shown; buffers that an operation needs only
while it runs are not in it. Added are the slots of memory that the worker shares with the receivers of its messages, in
whole pages.

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

from benchmarks.common import Block, Row, parser, report
from gpipe_cli.bench.steps import cpu_transport, engine_step, make_cell, squared_loss
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.planner.measure.tracking import Tracker

LAYERS = 16
WIDTH = 16
TOKENS = 8


class ByteCounter:
    """Counts the bytes of all living tensors made while it watches, whenever autograd saves one.

    Args:
        known: existing tensors, which do not count.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        self.highest = 0
        self._tracker = Tracker()
        self._tracker.ignore(known)

    @property
    def now(self) -> int:
        """Returns the bytes alive at this moment."""
        return self._tracker.now

    @contextmanager
    def watch(self) -> Iterator[None]:
        with self._tracker, torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept):
            yield

    def _save(self, tensor: Tensor) -> Tensor:
        self.highest = max(self.highest, self.now)
        return tensor.detach()


def make_micro_batches(M: int, examples: int) -> list[MicroBatch]:
    """Returns micro-batches in storages of their own."""
    shape = (examples // M, TOKENS, WIDTH)
    return [((torch.randn(shape),), (torch.zeros(1),)) for _ in range(M)]


def sum_of_squares(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return squared_loss(outputs, (torch.zeros_like(outputs[0]),))


def tensors_of(modules: list[nn.Module], micro_batches: list[MicroBatch]) -> list[Tensor]:
    """Returns the tensors that do not count: weights, their gradients, and the mini-batch."""
    weights = [parameter for module in modules for parameter in module.parameters()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return [*weights, *gradients, *(tensor for inputs, targets in micro_batches for tensor in inputs + targets)]


def worker(context: Context, config: dict[str, Any]) -> list[int]:
    """Returns the highest count of any worker, for each setting."""
    context.init_process_group()
    rank, K = context.rank, context.world_size
    highest = []
    for M, remat in config["settings"]:
        modules: list[nn.Module] = [Block(WIDTH) for _ in range(LAYERS // K)]
        micro_batches = make_micro_batches(M, config["examples"])
        cells, placement = [make_cell(rank, modules)], tuple(range(K))
        transport = cpu_transport(placement)
        step = engine_step(cells, placement, rank, transport, micro_batches, "gpipe", remat, sum_of_squares)
        step()  # the first step exchanges the shapes of messages
        dist.barrier()
        meter = ByteCounter(tensors_of(modules, micro_batches if rank == 0 else []))
        with meter.watch():
            step()
        most = torch.tensor([meter.highest + step.engine.bytes_shared])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        highest.append(int(most))
    return highest


def bytes_of_one_layer(examples: int) -> int:
    """Returns the bytes that one layer's graph keeps for so many examples, with its output: the next layer's input."""
    x = torch.randn(examples, TOKENS, WIDTH, requires_grad=True)
    layer = Block(WIDTH)
    meter = ByteCounter([x, *layer.parameters()])
    with meter.watch():
        y = layer(x)
        highest = meter.now
        del y
    return highest


def formula(K: int, M: int, remat: str, examples: int) -> float:
    """Returns N·L/K without re-materialization, N + (L/K)·(N/M) with it, in bytes."""
    layer = bytes_of_one_layer(examples)
    boundary = examples * TOKENS * WIDTH * 4
    return layer * LAYERS / K if remat == "never" else boundary + layer * LAYERS / K / M


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--K", type=int, nargs="+", default=[1, 2, 4, 8], help="divisors of 16 (default: 1 2 4 8)")
    options.add_argument("--M", type=int, nargs="+", default=[1, 4, 32], help="default: 1 4 32")
    options.add_argument("--examples", type=int, default=2048, help="N, a multiple of every M (default: 2048)")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.K, arguments.M = [1, 4], [1, 4]
    settings = [(M, remat) for remat in ("never", "except_last", "always") for M in arguments.M]

    def rows() -> Iterator[Row]:
        for K in arguments.K:
            config = {"settings": settings, "examples": arguments.examples}
            for (M, remat), measured in zip(settings, run_workers("benchmarks.memory:worker", K, config), strict=True):
                expected = formula(K, M, remat, arguments.examples)
                sizes = {
                    "measured, KiB": measured / 1024,
                    "formula, KiB": expected / 1024,
                    "ratio": measured / expected,
                }
                yield {"K": K, "M": M, "remat": remat, **sizes}

    columns = {"K": "d", "M": "d", "remat": "", "measured, KiB": ",.1f", "formula, KiB": ",.1f", "ratio": ".2f"}
    report(columns, rows(), arguments.output)


if __name__ == "__main__":
    main()
