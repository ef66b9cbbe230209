"""Runs micro-batches together, with BatchNorm over all of them.

BatchNorm is the one layer whose result depends on how the mini-batch is divided. A BatchNorm may stand anywhere inside
a layer, so `run_together` runs the micro-batches in threads that take turns: each runs to its next BatchNorm and waits
there for the others. Only one thread runs at a time, and each restores its own state of the random generators, so
dropout is the same as when they run one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..pipeline.randomness import generator_states, restore_generators

T = TypeVar("T")


def run_together(runs: Sequence[Callable[[], T]], batchnorms: Iterable[_BatchNorm], device: torch.device) -> list[T]:
    """Calls all ``runs`` with the statistics of ``batchnorms`` taken over all of them; returns their results.

    Args:
        runs: forwards of the same layers, each of its own micro-batch.
        device: where they run and draw random numbers.

    Raises:
        Exception: the first that any of them raises.
    """
    return _Turns(runs, device).run(batchnorms)


class _GaveUp(Exception):
    """Raised to end a run because another one has failed."""


class _Turns(Generic[T]):
    def __init__(self, runs: Sequence[Callable[[], T]], device: torch.device) -> None:
        self._runs, self._device = runs, device
        self._threads = torch.get_num_threads()
        self._turn = [threading.Semaphore(0) for _ in runs]
        self._results: dict[int, T] = {}
        self._waiting: list[Tensor] = []
        self._normalised: list[Tensor] = []
        self._error: BaseException | None = None
        self._here = threading.local()

    def run(self, batchnorms: Iterable[_BatchNorm]) -> list[T]:
        threads = [threading.Thread(target=self._one, args=(number,)) for number in range(len(self._runs))]
        with _replaced_forward(batchnorms, self._normalise):
            for thread in threads:
                thread.start()
            self._turn[0].release()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        return [self._results[number] for number in range(len(self._runs))]

    def _one(self, number: int) -> None:
        """Runs one thread; torch keeps its settings per thread."""
        self._here.number = number
        self._turn[number].acquire()
        try:
            if self._error is None:
                torch.set_num_threads(self._threads)
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                self._results[number] = self._runs[number]()
        except _GaveUp:
            pass
        except BaseException as error:
            self._error = error
        self._turn[(number + 1) % len(self._turn)].release()

    def _normalise(self, batchnorm: _BatchNorm, x: Tensor) -> Tensor:
        """Replaces a BatchNorm's forward: waits for the inputs of all runs and returns this one's outputs."""
        number: int = self._here.number
        self._waiting.append(x)
        if len(self._waiting) == len(self._runs):
            self._normalised, self._waiting = _over_all(batchnorm, self._waiting), []
        self._pass_turn(number)
        return self._normalised[number]

    def _pass_turn(self, number: int) -> None:
        state = generator_states(self._device)
        self._turn[(number + 1) % len(self._turn)].release()
        self._turn[number].acquire()
        if self._error is not None:
            raise _GaveUp
        restore_generators(self._device, state)


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
