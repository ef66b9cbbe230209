"""Compares one traced module with the module itself, and its layers, cut into K cells, with each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.traced.modules import Subject
from gpipe_cli import LayerBuilder, Pipeline
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.module_itself import Given, compare, example_of
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.models.traced.layers import layers

SEED, M, EXAMPLES = 3, 2, 3
CASES = [(K, remat) for K in (1, 2, 4) for remat in ("always", "never")]


@dataclass(frozen=True)
class Finding:
    """Describes how a module compares with itself.

    Attributes:
        layers: how many it became.
        seconds: of the processor, that tracing took.
        equal: whether outputs, gradients, buffers and what is trained are the module's own, but for rounding.
        difference: largest relative difference from them; 0: the same bits.
        same_cuts: whether all `CASES` have the same bits.
        where: the largest differences; why it is refused.
    """

    layers: int = 0
    seconds: float = 0.0
    equal: bool = False
    difference: float = 1.0
    same_cuts: bool = False
    where: str = ""

    @property
    def verified(self) -> bool:
        return self.equal and self.same_cuts


def find(subject: Subject, cases: Sequence[tuple[int, str]] = CASES) -> Finding:
    """Traces a module, compares its layers with it as gpipe-verify does, and runs them in each case."""
    torch.manual_seed(0)
    given = [subject.inputs(EXAMPLES) for _ in range(M)]
    began = time.process_time()
    try:
        builders = layers(subject.constructor, example_of(given[0]), SEED, **subject.call)
    except ConfigurationError as refusal:
        return Finding(where=str(refusal))
    seconds = time.process_time() - began
    compared = compare(builders, Given([(inputs, ()) for inputs in given], _loss, torch.optim.AdamW))
    found, in_float32 = compared.all, compared.float32
    runs = [_values(builders, K, remat, given) for K, remat in cases if len(builders) >= K]
    same = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    said = [*map(str, found.beyond[:3]), f"in float64; in float32 {in_float32}" if in_float32 else ""]
    where = "; ".join(filter(None, said)) or (f"at {found.worst}" if found.relative else "")
    return Finding(len(builders), seconds, not found.beyond, found.relative, same, where)


def _loss(outputs: Tensors, targets: object) -> Tensor:
    """Returns a mean to which every output counts differently."""
    weights = torch.linspace(0.5, 1.5, outputs[0][0].numel(), dtype=outputs[0].dtype).view(outputs[0].shape[1:])
    return (outputs[0].square() * weights).sum() / EXAMPLES


def _values(builders: Sequence[LayerBuilder], K: int, remat: str, given: Sequence[Tensors]) -> list[Tensor]:
    """Returns loss, gradients, weights and buffers of a step of K cells on one worker, and outputs in evaluation."""
    whole = [torch.cat(tensors) for tensors in zip(*given, strict=True)]
    labels = torch.zeros(M * EXAMPLES)
    pipeline = Pipeline.of(
        builders, lambda output, _: _loss((output,), _), (given[0], labels[:EXAMPLES]), K=K, M=M, remat=remat,
        seed=SEED, device="cpu",
    )  # fmt: skip
    loss = torch.tensor(pipeline.step(tuple(whole), labels))
    gradients = [parameter.grad for parameter in pipeline.parameters() if parameter.grad is not None]
    outputs = [outputs[0].clone() for outputs, _ in pipeline.forward(tuple(whole), labels)]
    return [loss, *gradients, *pipeline.state_dict().values(), *outputs]
