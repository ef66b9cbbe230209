"""Compares one traced module, cut into cells, with the module itself, run whole by torch's own autograd."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.traced.subject import TracedSubject
from gpipe_cli.commands.plan import make_request
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.models.traced import compare
from gpipe_cli.models.traced.compare import (
    GRADIENT,
    ROUNDING,
    Values,
    decide,
    differences,
    maker_of,
    run_module,
    values_of,
)
from gpipe_cli.models.traced.layers import traced_layers
from gpipe_cli.models.traced.module import Call, TracedFrom
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.partition.cut import cut_by_costs
from gpipe_cli.partition.fake_layers import CostError
from gpipe_cli.partition.tie_search import find_ties
from gpipe_cli.pipeline.batchnorm import finish_batchnorm
from gpipe_cli.pipeline.cell import BuiltLayer, Cell, build_layer
from gpipe_cli.pipeline.engine import Engine, StepInput
from gpipe_cli.pipeline.gradients import fill_gradients
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.tied_parameters import ReplicaLink, TiedParameters
from gpipe_cli.schedule.schedule import forward_only, schedule

SEED, M, EXAMPLES = 3, 2, 3
CPU = torch.device("cpu")
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
            found = decide(comparing.sides)
    except Exception as error:
        told = error if isinstance(error, ConfigurationError) else error.__cause__ or error
        refused = isinstance(told, (ConfigurationError, CostError))
        said = str(told) if refused else f"{type(told).__name__}: {told}"
        return Finding(0, 0, comparing.seconds, False, 1.0, 1.0, said, refused)
    worst = found.worst
    difference = worst.relative if worst is not None else 0.0
    decided = f"in float64; in float32 {found.decided}" if found.decided else ""
    reason = "; ".join(map(str, found.differing[:3])) or decided or (f"at {worst}" if difference else "")
    tied = sum(len(builder.tied) for builder in comparing.builders)
    return Finding(
        len(comparing.builders), tied, comparing.seconds, found.agrees, difference, comparing.cuts_differ, reason
    )


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
        gaps = differences(*self._narrow) if self._narrow else []
        if any(gap.relative > ROUNDING and not gap.kind.startswith(GRADIENT) for gap in gaps):
            raise ArithmeticError
        torch.manual_seed(0)
        given = [
            tuple(t.to(float_type) if t.is_floating_point() else t for t in self._subject.inputs(EXAMPLES))
            for _ in range(M)
        ]
        micro_batches: list[MicroBatch] = [(inputs, (torch.full((EXAMPLES,), m),)) for m, inputs in enumerate(given)]
        traced_from = TracedFrom(self._subject.constructor, Call(**self._subject.call), SEED)
        began = time.process_time()
        try:
            example = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in given[0]]
            self.builders = traced_layers(traced_from, example, float_type)
        finally:
            self.seconds = time.process_time() - began
        cases = [(K, remat) for K, remat in self._cases if len(self.builders) >= K]
        runs = _engine(self.builders, micro_batches, cases, float_type)
        between = [gap.relative for run in runs[1:] for gap in differences(run, runs[0])]
        self.cuts_differ = max([self.cuts_differ, *between])
        own = run_module(traced_from, micro_batches, lambda outputs, _: _loss(outputs) / (M * EXAMPLES), float_type)
        self._narrow = self._narrow or (runs[0], own)
        return runs[0], own


def _loss(outputs: Tensors) -> Tensor:
    """Returns a sum to which every output counts differently."""
    output = outputs[0]
    weights = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype).view(output.shape[1:])
    return (output.square() * weights).sum()


def _engine(
    builders: Sequence[LayerBuilder],
    micro_batches: Sequence[MicroBatch],
    cases: Sequence[tuple[int, str]],
    float_type: torch.dtype,
) -> list[Values]:
    """Returns what the engine computes, for each (K, remat) with K cells on one worker."""
    config = make_request(["model=transformer_lm_small"]).settings.pipeline
    costs, tied = layer_costs(builders, micro_batches[0][0], "flops"), find_ties(builders)
    runs = []
    for K, remat in cases:
        modules = [build_layer(builder, number, SEED, CPU) for number, builder in enumerate(builders)]
        if float_type is not torch.float32:
            modules = [module.to(float_type) for module in modules]
        layers = [
            BuiltLayer(number, builders[number].name, module, None, tied.owners[number])
            for number, module in enumerate(modules)
        ]
        cut = cut_by_costs(builders, costs, replace(config, K=K, M=M), 1, tied)
        apart = [deepcopy([layers[i] for i in part]) for part in cut.layers]  # cells of workers share no memory
        cells = [Cell(k, part, NoiseSource(SEED, 0, CPU)) for k, part in enumerate(apart)]
        uses = cut.uses([builder.name for builder in builders])
        ties = TiedParameters(uses, cells, ReplicaLink(0, [0], None))
        runs.append(_Engine(builders, cells, ties, micro_batches, remat).values())
    return runs


class _Engine:
    """Trains and evaluates as the trainer does."""

    def __init__(
        self,
        builders: Sequence[LayerBuilder],
        cells: Sequence[Cell],
        ties: TiedParameters,
        micro_batches: Sequence[MicroBatch],
        remat: str,
    ) -> None:
        self._builders, self._cells, self._ties, self._micro_batches = builders, cells, ties, micro_batches
        self._outputs: dict[int, Tensor] = {}
        placement = [0] * len(cells)
        self._engine = Engine(cells, placement, None, self._loss, 1, CPU)
        self._signatures = tuple(tuple(tuple(t.shape) for t in inputs) for inputs, _ in micro_batches)
        self._train, self._evaluate = schedule("gpipe", placement, M, remat)[0], forward_only(placement, M)[0]
        for cell in cells:
            cell.guard_buffers()

    def values(self) -> Values:
        return values_of(self._training, self._evaluation, self._tensors)

    def _loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        self._outputs[int(targets[0][0])] = outputs[0].detach().clone()
        return _loss(outputs), torch.zeros(0, dtype=torch.float64)

    def _training(self) -> Iterator[Tensor]:
        self._ties.spread()
        for cell in self._cells:
            cell.train(True)
        step = StepInput(0, 1, self._signatures, 1 / (M * EXAMPLES))
        self._engine.train_step(self._train, step, self._copies(), None)
        fill_gradients(parameter for cell in self._cells for _, parameter in cell.parameters())
        self._ties.add_gradients()
        finish_batchnorm([batchnorm for cell in self._cells for batchnorm in cell.batchnorms], None)
        yield from (self._outputs[number] for number in range(M))

    def _evaluation(self) -> Iterator[Tensor]:
        for cell in self._cells:
            cell.train(False)
        signatures = [("evaluation", *signature) for signature in self._signatures]
        self._engine.run_forward(self._evaluate, signatures, self._copies(), self._sink)
        yield from (self._outputs[number] for number in range(M))

    def _sink(self, number: int, outputs: Tensors, targets: Tensors) -> None:
        self._outputs[number] = outputs[0].clone()

    def _copies(self) -> list[MicroBatch]:
        return [(tuple(tensor.clone() for tensor in inputs), targets) for inputs, targets in self._micro_batches]

    def _tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their first name in the module; of a tied parameter the owner's."""
        found: dict[str, Tensor] = {}
        for layer in (layer for cell in self._cells for layer in cell.layers):
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
