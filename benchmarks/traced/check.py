"""Compares one traced module, cut into cells, with the module itself, run whole by torch's own autograd."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.traced.itself import (
    EXAMPLES,
    SEED,
    STEPS,
    M,
    Results,
    buffer_key,
    constructed,
    copies,
    gradient_key,
    loss_of,
    names_of,
    output_key,
    run_itself,
    trained_key,
    update,
)
from benchmarks.traced.subject import TracedSubject
from gpipe_cli.commands.plan import make_request
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.cut import cut_by_costs
from gpipe_cli.layers import AGAIN, LayerBuilder, own_name
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.models.traced.layers import layers
from gpipe_cli.partition.cost import layer_costs
from gpipe_cli.partition.fake_layers import CostError
from gpipe_cli.partition.ties import find_ties
from gpipe_cli.pipeline.batchnorm import finish_batchnorm
from gpipe_cli.pipeline.cell import BuiltLayer, Cell, build_layer
from gpipe_cli.pipeline.engine import Pipeline, StepInput
from gpipe_cli.pipeline.gradients import fill_gradients
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.ties import ReplicaLink, TiedParameters
from gpipe_cli.schedule.schedule import forward_only, schedule

CPU = torch.device("cpu")
LARGEST = 1e-4  # relative difference that still counts as rounding
NOTHING = 1e-6  # in float64, a share of the largest gradient's norm: a smaller gradient counts as so large
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
        difference: largest relative difference from the module's own outputs, gradients and buffers; 0: the same bits.
        cuts_differ: largest difference between two of `CASES`, which must be 0.
        reason: why it was refused, or where the difference is.
        refused: whether it was refused, by a message for the user.
        only_gradients: whether nothing but gradients differs by more than rounding.
    """

    layers: int
    tied: int
    seconds: float
    difference: float
    cuts_differ: float
    reason: str
    refused: bool = False
    only_gradients: bool = False

    @property
    def verified(self) -> bool:
        return self.layers > 0 and self.difference <= LARGEST and self.cuts_differ == 0

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
    """Traces a module and compares it, cut into K cells, with the module itself.

    Where only gradients differ by more than rounding in float32 usually does, the comparison is made again in float64.
    A gradient that is zero but for rounding, as that of a bias in front of a BatchNorm, has no digits in either.
    """
    found = _compared(subject, cases, torch.float32)
    if found.only_gradients:
        with suppress(RuntimeError):  # of a module with types of its own
            again = _compared(subject, cases, torch.float64)
            if again.layers and again.difference <= LARGEST**2:
                reason = f"in float64; {found.difference:.0e} in float32, {found.reason}"
                return replace(again, cuts_differ=max(found.cuts_differ, again.cuts_differ), reason=reason)
    return found


def _compared(subject: TracedSubject, cases: Sequence[tuple[int, str]], float_type: torch.dtype) -> Finding:
    torch.manual_seed(0)
    given = [
        tuple(t.to(float_type) if t.is_floating_point() else t for t in subject.inputs(EXAMPLES)) for _ in range(M)
    ]
    micro_batches: list[MicroBatch] = [(inputs, (torch.full((EXAMPLES,), m),)) for m, inputs in enumerate(given)]
    example = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in given[0]]
    module = constructed(subject, float_type)
    own = run_itself(module, micro_batches)  # before the trace, which runs the code too
    began = time.process_time()
    try:
        typed = str(float_type).removeprefix("torch.")
        builders = layers(subject.constructor, example, SEED, **subject.call, float_type=typed)
        seconds = time.process_time() - began
        if float_type is not torch.float32:
            builders = [replace(b, build=partial(_build, b.build, float_type)) for b in builders]
        runs = _engine(builders, micro_batches, [(K, remat) for K, remat in cases if len(builders) >= K])
    except Exception as error:
        told = error if isinstance(error, ConfigurationError) else error.__cause__ or error
        refused = isinstance(told, (ConfigurationError, CostError))
        said = str(told) if refused else f"{type(told).__name__}: {told}"
        return Finding(0, 0, time.process_time() - began, 1.0, 1.0, said, refused)
    gradients = [float(value.norm()) for key, value in own.items() if "gradient" in key]
    least = 0.0 if float_type is torch.float32 else NOTHING * max(gradients)
    differences = _missing(runs[0], names_of(module.module)) | _differences(runs[0], own, least)
    between = max(max(_differences(run, runs[0]).values()) for run in runs)
    worst = max(differences, key=lambda key: differences[key])
    large = {key: size for key, size in differences.items() if size > LARGEST}
    named = [f"{key} ({size:.0e})" if size < 1e3 else key for key, size in large.items()]
    reason = "; ".join(named[:3]) or ("" if differences[worst] == 0 else f"at {worst}")
    tied = sum(len(builder.tied) for builder in builders)
    only_gradients = bool(large) and all("gradient" in key for key in large)
    return Finding(len(builders), tied, seconds, differences[worst], between, reason, only_gradients=only_gradients)


def _build(build: Callable[[], nn.Module], float_type: torch.dtype) -> nn.Module:
    return build().to(float_type)


def _engine(
    builders: Sequence[LayerBuilder], micro_batches: Sequence[MicroBatch], cases: Sequence[tuple[int, str]]
) -> list[Results]:
    """Returns what `run_itself` returns from the engine, for each (K, remat) with K cells on one worker."""
    config = make_request(["model=transformer_lm_small"]).settings.pipeline
    costs, tied = layer_costs(builders, micro_batches[0][0], "flops"), find_ties(builders)
    runs = []
    for K, remat in cases:
        layers = [
            BuiltLayer(number, builder.name, build_layer(builder, number, SEED, CPU), None, tied.owners[number])
            for number, builder in enumerate(builders)
        ]
        cut = cut_by_costs(builders, costs, replace(config, K=K, M=M), 1, tied)
        apart = [deepcopy([layers[i] for i in part]) for part in cut.layers]  # cells of workers share no memory
        cells = [Cell(k, part, NoiseSource(SEED, 0, CPU)) for k, part in enumerate(apart)]
        uses = cut.uses([builder.name for builder in builders])
        runs.append(_run(cells, TiedParameters(uses, cells, ReplicaLink(0, [0], None)), micro_batches, remat))
    return runs


def _run(cells: Sequence[Cell], ties: TiedParameters, micro_batches: Sequence[MicroBatch], remat: str) -> Results:
    """Trains and evaluates as the trainer does."""
    found: Results = {}
    step = 0

    def loss(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        found[output_key(step, int(targets[0][0]), True)] = outputs[0].detach().clone()
        return loss_of(outputs, targets)

    def sink(number: int, outputs: Tensors, targets: Tensors) -> None:
        found[output_key(step, number, False)] = outputs[0].clone()

    ties.spread()
    placement = [0] * len(cells)
    engine = Pipeline(cells, placement, None, loss, 1, CPU)
    signatures = tuple(tuple(tuple(t.shape) for t in inputs) for inputs, _ in micro_batches)
    train, evaluate = schedule("gpipe", placement, M, remat)[0], forward_only(placement, M)[0]
    held = [layer for cell in cells for layer in cell.layers]
    for cell in cells:
        cell.guard_buffers()
    for step in range(STEPS):
        for cell in cells:
            cell.train(True)
        engine.train_step(train, StepInput(step, STEPS, signatures, 1 / (M * EXAMPLES)), _copied(micro_batches), None)
        fill_gradients(parameter for cell in cells for _, parameter in cell.parameters())
        ties.add_gradients()
        for layer in held:
            for name, parameter in layer.module.named_parameters():
                if name not in layer.tied:
                    full, gradient = own_name(layer.name, name).partition(AGAIN)[0], parameter.grad
                    found[gradient_key(step, full)] = torch.zeros_like(parameter) if gradient is None else gradient
                    found[trained_key(step, full)] = torch.tensor(parameter.requires_grad)
        update(parameter for cell in cells for _, parameter in cell.parameters())
        ties.spread()
        finish_batchnorm([batchnorm for cell in cells for batchnorm in cell.batchnorms], None)
        for layer in held:
            for name, buffer in layer.module.named_buffers():
                key = buffer_key(step, own_name(layer.name, name))
                same = key not in found or torch.equal(found[key], buffer)  # layers that hold it have copies
                found[key] = buffer.clone() if same else torch.empty(0)
        for cell in cells:
            cell.train(False)
        engine.run_forward(evaluate, [("evaluation", *s) for s in signatures], _copied(micro_batches), sink)
    return found


def _copied(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    return [(copies(inputs), targets) for inputs, targets in micro_batches]


def _missing(found: Results, names: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns parameters and buffers that the layers have under none of their names, and parameters that are new."""
    known = {name for tensor in names for name in tensor}
    there = {key.partition(" of ")[2] or key.partition("buffer ")[2] for key in found}
    trained = {key.partition(" of ")[2] for key in found if " of " in key}
    lost = [f"no {tensor[0]}" for tensor in names if not there & set(tensor)]
    return dict.fromkeys([*lost, *(f"parameter {name}" for name in trained - known)], float("inf"))


def _differences(found: Results, own: Results, least: float = 0.0) -> dict[str, float]:
    """Returns relative differences by name; a tensor with several names has but one among the layers."""
    return {
        key: _difference(found[key], value, least if "gradient" in key else 0.0)
        for key, value in own.items()
        if key in found
    }


def _difference(one: Tensor, other: Tensor, least: float) -> float:
    """Returns 0 for the same bits, else the norm of the difference as a share of the norm, or of ``least``."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    if not bool(torch.isfinite(one).all()):
        return float("inf")
    one, other = (torch.view_as_real(t) if t.is_complex() else t for t in (one, other))
    norm = float(torch.linalg.vector_norm(other.double()))
    return float(torch.linalg.vector_norm(one.double() - other.double())) / max(norm, least, 1e-30)
