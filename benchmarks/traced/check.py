"""Compares one traced module, cut into cells, with the module itself, run whole by torch's own autograd."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.traced.subject import TracedSubject
from gpipe_cli import Pipeline
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.models.traced import compare
from gpipe_cli.models.traced.compare import (
    GRADIENT,
    ROUNDING,
    SMALL,
    Values,
    decide,
    differences,
    example_of,
    judge,
    maker_of,
    run_module,
    values_of,
    widened,
)
from gpipe_cli.models.traced.layers import traced_layers
from gpipe_cli.models.traced.module import Call, TracedFrom
from gpipe_cli.partition.fake_layers import CostError
from gpipe_cli.tasks.base import Task

SEED, M, EXAMPLES = 3, 2, 3
CASES = [(K, remat) for K in (1, 2, 4) for remat in ("always", "never")]
LINE = re.compile(r"\S+\.py, line \d+")
DIFFERENT = "SILENTLY DIFFERENT"


@dataclass(frozen=True)
class Finding:
    """Describes how a module compares with itself.

    Attributes:
        layers: how many it became.
        tied: parameters that several layers hold.
        seconds: that tracing took.
        equal: whether outputs, gradients, buffers and what is trained are the module's own, but for rounding.
        difference: largest relative difference from them; 0: the same bits.
        cuts_differ: largest difference between two of `CASES`, which must be 0.
        reason: why it was refused, or where the difference is.
        refused: whether it was refused, by a message for the user.
    """

    layers: int
    tied: int
    seconds: float
    equal: bool
    difference: float
    cuts_differ: float
    reason: str
    refused: bool = False

    @property
    def verified(self) -> bool:
        return self.equal and self.cuts_differ == 0

    @property
    def verdict(self) -> str:
        if self.verified:
            return "same bits" if self.difference == 0 else f"{self.difference:.0e}"
        if self.refused:
            return "refused" if LINE.search(self.reason) else "refused without a line"
        return DIFFERENT if self.layers else "fails"

    @property
    def right(self) -> bool:
        """Returns whether the module is equal to itself, or refused with a line of its code."""
        return self.verified or self.verdict == "refused"


def find(subject: TracedSubject, cases: Sequence[tuple[int, str]] = CASES) -> Finding:
    """Traces a module and compares it, cut into K cells, with the module itself, as gpipe-verify does.

    The modules draw no numbers that would have to be the same on both sides; one that seeds and draws shows so.
    """
    comparing = _Comparing(subject, cases)
    try:
        with patch.object(compare, "_SameNoise", nullcontext):
            found, in_float32 = decide(comparing.sides)
    except Exception as error:
        told = error if isinstance(error, ConfigurationError) else error.__cause__ or error
        refused = isinstance(told, (ConfigurationError, CostError))
        said = str(told) if refused else f"{type(told).__name__}: {told}"
        return Finding(0, 0, comparing.seconds, False, 1.0, 1.0, said, refused)
    difference = found.relative
    decided = f"in float64; in float32 {in_float32}" if in_float32 else ""
    reason = "; ".join(map(str, found.beyond[:3])) or decided or (f"at {found.worst}" if difference else "")
    tied = sum(len(builder.tied) for builder in comparing.builders)
    equal = not found.beyond
    return Finding(len(comparing.builders), tied, comparing.seconds, equal, difference, comparing.cuts_differ, reason)


class _Comparing:
    """Runs both sides.

    Attributes:
        builders: layers of the module, as last traced.
        seconds: that tracing took.
        cuts_differ: largest difference between two cases so far.
    """

    def __init__(self, subject: TracedSubject, cases: Sequence[tuple[int, str]]) -> None:
        self._subject, self._cases = subject, cases
        self.builders: list[LayerBuilder] = []
        self.seconds = self.cuts_differ = 0.0
        self._narrow: tuple[Values, Values] | None = None  # in float32

    def sides(self, float_type: torch.dtype) -> tuple[Values, Values]:
        """Returns what the engine computes and what the module itself does.

        Raises:
            ArithmeticError: float64 is asked about outputs and buffers that differ, where there is no cancellation; it
                would part tensors that share memory.
        """
        found = judge(differences(*self._narrow), ROUNDING, SMALL) if self._narrow else []
        if any(quantity.beyond and not quantity.name.startswith(GRADIENT) for quantity in found):
            raise ArithmeticError
        torch.manual_seed(0)
        given = [widened(self._subject.inputs(EXAMPLES), float_type) for _ in range(M)]
        micro_batches: list[MicroBatch] = [(inputs, (torch.full((EXAMPLES,), m),)) for m, inputs in enumerate(given)]
        traced_from = TracedFrom(self._subject.constructor, Call(**self._subject.call), SEED)
        began = time.process_time()
        try:
            self.builders = traced_layers(traced_from, example_of(given[0]), float_type)
        finally:
            self.seconds = time.process_time() - began
        cases = [(K, remat) for K, remat in self._cases if len(self.builders) >= K]
        runs = [_Cut(self.builders, K, remat, micro_batches, float_type).values() for K, remat in cases]
        between = [quantity.relative for run in runs[1:] for quantity in judge(differences(run, runs[0]), 0.0)]
        self.cuts_differ = max([self.cuts_differ, *between])
        own = run_module(traced_from, micro_batches, lambda outputs, _: _loss(outputs) / (M * EXAMPLES), float_type)
        self._narrow = self._narrow or (runs[0], own)
        return runs[0], own


def _loss(outputs: Tensors) -> Tensor:
    """Returns a sum to which every output counts differently."""
    output = outputs[0]
    weights = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype).view(output.shape[1:])
    return (output.square() * weights).sum()


class _Sums(Task):
    """Keeps the outputs that it scores."""

    def __init__(self) -> None:
        self.outputs: dict[int, Tensor] = {}

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        self.outputs[int(targets[0][0])] = outputs[0].detach().clone()
        return _loss(outputs), torch.zeros(0, dtype=torch.float64)


class _Cut:
    """Trains and evaluates the layers, cut into K cells on one worker."""

    def __init__(
        self,
        builders: Sequence[LayerBuilder],
        K: int,
        remat: str,
        micro_batches: Sequence[MicroBatch],
        float_type: torch.dtype,
    ) -> None:
        self._builders, self._micro_batches, self._task = builders, micro_batches, _Sums()
        if float_type is not torch.float32:
            builders = [replace(builder, build=partial(_widened, builder, float_type)) for builder in builders]
        self._pipeline = Pipeline.of(
            builders, self._task, micro_batches[0], K=K, M=M, remat=remat, seed=SEED, device="cpu"
        )

    def values(self) -> Values:
        return values_of(self._training, self._evaluation, self._tensors)

    def _whole(self) -> list[Tensors]:
        """Returns inputs and targets of the mini-batch."""
        return [tuple(map(torch.cat, zip(*side, strict=True))) for side in zip(*self._micro_batches, strict=True)]

    def _training(self) -> Iterator[Tensor]:
        self._pipeline.step(*self._whole())
        yield from (self._task.outputs[number] for number in range(M))

    def _evaluation(self) -> Iterator[Tensor]:
        yield from (outputs[0].clone() for outputs, _ in self._pipeline.forward(*self._whole()))

    def _tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their first name in the module; of a tied parameter the owner's."""
        found: dict[str, Tensor] = {}
        for layer in (layer for cell in self._pipeline.cells for layer in cell.layers):
            for path, first in maker_of(self._builders[layer.index]).held.items():
                way, _, name = path.rpartition(".")
                tensor = getattr(layer.module.get_submodule(way), name)
                if isinstance(tensor, nn.Parameter):
                    if path not in layer.tied:
                        found[first] = tensor
                else:
                    same = first not in found or torch.equal(found[first], tensor)
                    found[first] = tensor if same else torch.empty(0)  # layers that hold it have copies
        return found


def _widened(builder: LayerBuilder, float_type: torch.dtype) -> nn.Module:
    return builder.build().to(float_type)
