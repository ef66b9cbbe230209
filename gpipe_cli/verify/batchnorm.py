"""Runs micro-batches together, with BatchNorm over all of them.

BatchNorm is the one layer whose result depends on how the mini-batch is divided. A BatchNorm may stand anywhere inside
a layer, so `run_together` runs the micro-batches in threads that take turns: each runs to its next BatchNorm and waits
there for the others. Only one thread runs at a time, and each restores its own state of the random generators, so
dropout is the same as when they run one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..pipeline.randomness import generator_states, restore_generators

T = TypeVar("T")


class _GaveUp(Exception):
    """Raised to end a run because another one has failed."""


def run_together(runs: Sequence[Callable[[], T]], batchnorms: Iterable[_BatchNorm], device: torch.device) -> list[T]:
    """Calls all ``runs`` with the statistics of ``batchnorms`` taken over all of them; returns their results.

    Args:
        runs: forwards of the same layers, each of its own micro-batch.
        device: where they run and draw random numbers.

    Raises:
        Exception: the first that any of them raises.
    """
    count, threads = len(runs), torch.get_num_threads()
    turns = [threading.Semaphore(0) for _ in runs]
    here, failed = threading.local(), threading.Event()
    waiting: list[Tensor] = []
    normalised: list[Tensor] = []

    def run(number: int) -> T:
        here.number = number
        turns[number].acquire()
        try:
            if failed.is_set():
                raise _GaveUp
            torch.set_num_threads(threads)  # torch keeps its settings per thread
            if device.type == "cuda":
                torch.cuda.set_device(device)
            return runs[number]()
        except BaseException:
            failed.set()
            raise
        finally:
            turns[(number + 1) % count].release()

    def normalise(batchnorm: _BatchNorm, x: Tensor) -> Tensor:
        """Replaces a BatchNorm's forward: waits for the inputs of all runs and returns this one's outputs."""
        number: int = here.number
        waiting.append(x)
        if len(waiting) == count:
            normalised[:] = _over_all(batchnorm, waiting)
            waiting.clear()
        state = generator_states(device)
        turns[(number + 1) % count].release()
        turns[number].acquire()
        if failed.is_set():
            raise _GaveUp
        restore_generators(device, state)
        return normalised[number]

    with _replaced_forward(batchnorms, normalise), ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, number) for number in range(count)]
        turns[0].release()
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, _GaveUp)):
        raise error
    return [future.result() for future in futures]


def _over_all(batchnorm: _BatchNorm, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Normalises inputs of shape (n, C, …) by the statistics of them all; the moving averages stay as they are."""
    rows = [x.movedim(1, -1) for x in inputs]
    flat = [x.reshape(-1, x.shape[-1]) for x in rows]
    output = F.batch_norm(torch.cat(flat), None, None, batchnorm.weight, batchnorm.bias, True, 0.0, batchnorm.eps)
    micro_batches = torch.split(output, [len(x) for x in flat])
    # Copies, because a layer may write into its BatchNorm's output.
    return [y.reshape(x.shape).movedim(-1, 1).clone() for y, x in zip(micro_batches, rows, strict=True)]


@contextmanager
def _replaced_forward(
    batchnorms: Iterable[_BatchNorm], forward: Callable[[_BatchNorm, Tensor], Tensor]
) -> Iterator[None]:
    replaced = list(batchnorms)
    for batchnorm in replaced:
        batchnorm.forward = partial(forward, batchnorm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for batchnorm in replaced:
            del batchnorm.forward
