"""Compares BatchNorm over micro-batches with BatchNorm over the whole mini-batch, as it would be with M = 1.

BatchNorm is the one layer whose result depends on how the mini-batch is divided. A BatchNorm may stand anywhere inside
a layer, so `run_together` runs the micro-batches in threads that take turns: each runs to its next BatchNorm and waits
there for the others. Only one thread runs at a time, and each restores its own state of the random generators, so
dropout is the same as when they run one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..micro_batch import MicroBatch
from ..pipeline.randomness import generator_states, restore_generators
from .compare import GRADIENTS, LOSS, OUTPUTS, compare
from .record import StepState

T = TypeVar("T")


# -- the difference that M makes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchNormNote:
    """Describes the first step with BatchNorm over each micro-batch beside the same over the whole mini-batch.

    Attributes:
        layers: BatchNorm layers.
        micro_batch, mini_batch: the number of examples in each.
        loss, whole_loss: of the plain loop, over micro-batches and over the mini-batch.
        loss_differs, gradients_differ: largest relative differences between the two.
        first_layer: the first, in forward, whose output differs; None: none.
        explains: the pipeline differs from the plain loop over micro-batches, and agrees with the other one.
    """

    layers: int
    micro_batch: int
    mini_batch: int
    loss: float
    whole_loss: float
    loss_differs: float
    gradients_differ: float
    first_layer: str | None
    explains: bool

    @property
    def text(self) -> str:
        """Returns the note as sentences."""
        over = f"{self.layers} BatchNorm layers normalise over {self.micro_batch} examples"
        if self.first_layer is None:
            return f"{over}, and over all {self.mini_batch} of the mini-batch nothing would be different"
        with_all = (
            f"{over}: with M=1, over all {self.mini_batch}, the loss of step 1 would be {self.whole_loss:.6g} instead "
            f"of {self.loss:.6g} (all else equal), and the output of {self.first_layer} the first to differ"
        )
        if self.explains:
            return f"{with_all}. The pipeline agrees with that: its BatchNorm normalises over the whole mini-batch"
        return f"{with_all}. That is BatchNorm's doing (paper, section 2.2), and no error"


def batchnorm_note(
    layers: int,
    micro_batches: Sequence[Sequence[MicroBatch]],
    sides: tuple[StepState, StepState, StepState],
    tolerance: float,
    names: Sequence[str],
) -> BatchNormNote:
    """Compares three records of one step.

    Args:
        layers: BatchNorm layers of the model.
        micro_batches: of the mini-batch, by replica.
        sides: of the pipeline, of the plain loop, of the plain loop with BatchNorm over the whole mini-batch.
    """
    ours, plain, whole = sides
    sizes = [len(inputs[0]) for replica in micro_batches for inputs, _ in replica]
    divided = compare(plain, whole, StepState(), tolerance, names)
    losses, gradients, outputs = divided[LOSS].worst, divided[GRADIENTS].worst, divided[OUTPUTS].beyond
    as_whole = compare(ours, whole, StepState(), tolerance, names)
    as_plain = compare(ours, plain, StepState(), tolerance, names)
    return BatchNormNote(
        layers=layers,
        micro_batch=max(sizes),
        mini_batch=sum(sizes),
        loss=plain.loss,
        whole_loss=whole.loss,
        loss_differs=losses.relative if losses else 0.0,
        gradients_differ=gradients.relative if gradients else 0.0,
        first_layer=names[outputs[0].layer] if outputs else None,
        explains=bool(as_plain[OUTPUTS].beyond) and not as_whole[OUTPUTS].beyond,
    )


# -- BatchNorm over several micro-batches ----------------------------------------------------------------------------


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
