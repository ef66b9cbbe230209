"""Compares one traced module, cut into cells, with the module itself and torch's own autograd."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.traced.modules import TracedSubject
from gpipe_cli.commands.plan import make_request
from gpipe_cli.factory.cut import cut_by_costs
from gpipe_cli.layers import LayerBuilder, own_name
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.models.traced.layers import layers
from gpipe_cli.models.traced.module import Call, Called
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.partition.ties import find_ties
from gpipe_cli.pipeline.cell import BuiltLayer, Cell, build_layer
from gpipe_cli.pipeline.engine import Pipeline, StepInput
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.ties import ReplicaLink, TiedParameters
from gpipe_cli.schedule.schedule import schedule

SEED, M, EXAMPLES = 3, 2, 3
CPU = torch.device("cpu")
LARGEST = 1e-4  # relative difference of a gradient that still counts as rounding
NOTHING = 1e-6  # in float64, a share of the largest gradient's norm: a smaller gradient counts as so large
CASES = [(K, remat) for K in (1, 2, 4) for remat in ("always", "never")]


@dataclass(frozen=True)
class Finding:
    """Describes how a module compares with itself.

    Attributes:
        layers: how many it became.
        tied: parameters that several layers hold.
        seconds: that tracing took.
        difference: largest relative difference of a gradient or output from the module's own; 0: the same bits.
        cuts_differ: largest difference between two of `CASES`, which must be 0.
        reason: why it could not be verified, or where the difference is.
    """

    layers: int
    tied: int
    seconds: float
    difference: float
    cuts_differ: float
    reason: str

    @property
    def verified(self) -> bool:
        return self.layers > 0 and self.difference <= LARGEST and self.cuts_differ == 0


def find(subject: TracedSubject, cases: Sequence[tuple[int, str]] = CASES) -> Finding:
    """Traces a module and compares it, cut into K cells, with the module itself.

    Where a gradient differs by more than rounding in float32 usually does, the comparison is made again in float64. A
    gradient that is zero but for rounding, as that of a bias in front of a BatchNorm, has no digits in either.
    """
    found = _compared(subject, cases, torch.float32)
    if found.layers and found.difference > LARGEST:
        again = _compared(subject, cases, torch.float64)
        reason = f"in float64; {found.difference:.0e} in float32, {found.reason}"
        difference = again.difference if again.difference <= LARGEST**2 else found.difference
        between = max(found.cuts_differ, again.cuts_differ)
        return replace(again, difference=difference, cuts_differ=between, reason=reason)
    return found


def _compared(subject: TracedSubject, cases: Sequence[tuple[int, str]], float_type: torch.dtype) -> Finding:
    began = time.process_time()
    torch.manual_seed(0)
    given = [
        tuple(t.to(float_type) if t.is_floating_point() else t for t in subject.inputs(EXAMPLES)) for _ in range(M)
    ]
    micro_batches: list[MicroBatch] = [(inputs, (torch.zeros(EXAMPLES),)) for inputs in given]
    example = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in given[0]]
    try:
        typed = str(float_type).removeprefix("torch.")
        builders = [
            replace(builder, build=partial(_build, builder.build, float_type))
            for builder in layers(subject.constructor, example, SEED, **subject.call, float_type=typed)
        ]
        seconds = time.process_time() - began
        module = _module(subject).to(float_type)
        runs = _engine(builders, micro_batches, [(K, remat) for K, remat in cases if len(builders) >= K])
    except Exception as error:
        return Finding(0, 0, time.process_time() - began, 1.0, 1.0, f"{type(error).__name__}: {error}"[:300])
    own = _by_itself(module, micro_batches)
    trained = [name for name, parameter in module.module.named_parameters() if parameter.requires_grad]
    missing = sorted(own.keys() ^ runs[0].keys()) if len(runs[0]) != len(trained) + 1 else []
    least = 0.0 if float_type is torch.float32 else NOTHING * max(float(value.norm()) for value in own.values())
    worst, where = max((_difference(runs[0][name], own[name], least), name) for name in own if name in runs[0])
    between = max(_difference(run[name], runs[0][name]) for run in runs for name in run)
    reason = f"other parameters: {missing[:3]}" if missing else "" if worst == 0 else f"at {where}"
    tied = sum(len(builder.tied) for builder in builders)
    return Finding(len(builders), tied, seconds, 1.0 if missing else worst, between, reason)


def _build(build: Callable[[], nn.Module], float_type: torch.dtype) -> nn.Module:
    return build().to(float_type)


def _module(subject: TracedSubject) -> Called:
    torch.manual_seed(SEED)
    called = Called(subject.constructor(), Call(**subject.call))
    return called.train()


def loss_of(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
    """Returns a sum to which every output counts differently."""
    output = outputs[0]
    weights = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype).view(output.shape[1:])
    return (output.square() * weights).sum(), torch.zeros(0, dtype=torch.float64)


def _by_itself(called: Called, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Returns the gradients by name that plain autograd gives, and the last micro-batch's loss."""
    total = torch.zeros(())
    for inputs, targets in micro_batches:
        loss = loss_of((called(*inputs),), targets)[0] / (M * EXAMPLES)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        total = loss.detach()
    return {"outputs": total, **dict(_gradients(called.module.named_parameters(remove_duplicate=False)))}


def _gradients(named: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in named:
        if parameter.requires_grad:
            yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _engine(
    builders: Sequence[LayerBuilder], micro_batches: Sequence[MicroBatch], cases: Sequence[tuple[int, str]]
) -> list[dict[str, Tensor]]:
    """Returns the same from the engine, for each (K, remat) with K cells on one worker."""
    config = make_request(["model=transformer_lm_small"]).settings.pipeline
    costs, tied = layer_costs(builders, micro_batches[0][0], "flops"), find_ties(builders)
    modules = [build_layer(builder, number, SEED, CPU) for number, builder in enumerate(builders)]
    layers = [
        BuiltLayer(number, builders[number].name, module, None, tied.owners[number])
        for number, module in enumerate(modules)
    ]
    runs = []
    for K, remat in cases:
        cut = cut_by_costs(builders, costs, replace(config, K=K, M=M), 1, tied)
        cells = [Cell(k, [layers[i] for i in part], NoiseSource(SEED, 0, CPU)) for k, part in enumerate(cut.layers)]
        uses = cut.uses([builder.name for builder in builders])
        runs.append(_step(cells, TiedParameters(uses, cells, ReplicaLink(0, [0], None)), micro_batches, remat))
    return runs


def _step(
    cells: Sequence[Cell], ties: TiedParameters, micro_batches: Sequence[MicroBatch], remat: str
) -> dict[str, Tensor]:
    for cell in cells:
        cell.train(True)
    ties.spread()
    placement = [0] * len(cells)
    engine = Pipeline(cells, placement, None, loss_of, 1, CPU)
    signatures = tuple(tuple(tuple(t.shape) for t in inputs) for inputs, _ in micro_batches)
    lists = schedule("gpipe", placement, M, remat)
    record = engine.train_step(lists[0], StepInput(0, 1, signatures, 1 / (M * EXAMPLES)), list(micro_batches), None)
    ties.add_gradients()
    parameters = [
        (own_name(layer.name, name), parameter)
        for cell in cells
        for layer in cell.layers
        for name, parameter in layer.module.named_parameters()
        if name not in layer.tied
    ]
    losses = sorted(record.losses.items(), key=str)
    found = {"outputs": losses[-1][1].detach() / (M * EXAMPLES), **dict(_gradients(parameters))}
    for _, parameter in parameters:
        parameter.grad = None
    return found


def _difference(one: Tensor, other: Tensor, least: float = 1e-30) -> float:
    """Returns 0 for the same bits, else the norm of the difference as a share of the norm, or of ``least``."""
    if torch.equal(one, other):
        return 0.0
    if one.shape != other.shape or not bool(torch.isfinite(one).all()):
        return float("inf")
    norm = float(torch.linalg.vector_norm(other.double()))
    return float(torch.linalg.vector_norm(one.double() - other.double())) / max(norm, least, 1e-30)
