"""Runs a module itself, whole, by torch's own autograd, in training and in evaluation mode."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.traced.subject import TracedSubject
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.models.traced.module import Call, Called

SEED, M, EXAMPLES, STEPS, RATE = 3, 2, 3, 2, 0.05
Results = dict[str, Tensor]


def output_key(step: int, number: int, training: bool) -> str:
    return f"step {step + 1}: output {number + 1}{'' if training else ' in evaluation'}"


def gradient_key(step: int, name: str) -> str:
    return f"step {step + 1}: gradient of {name}"


def trained_key(step: int, name: str) -> str:
    return f"step {step + 1}: whether {name} is trained"


def buffer_key(step: int, name: str) -> str:
    return f"step {step + 1}: buffer {name}"


def loss_of(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
    """Returns a sum to which every output counts differently."""
    output = outputs[0]
    weights = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype).view(output.shape[1:])
    return (output.square() * weights).sum(), torch.zeros(0, dtype=torch.float64)


def copies(inputs: Tensors) -> Tensors:
    """Returns copies, because some modules change their input."""
    return tuple(tensor.clone() for tensor in inputs)


def constructed(subject: TracedSubject, float_type: torch.dtype) -> Called:
    """Returns the module with the weights of `SEED`."""
    for seeding in (torch.manual_seed, random.seed, np.random.seed):
        seeding(SEED)
    called = Called(subject.constructor(), Call(**subject.call))
    return called if float_type is torch.float32 else called.to(float_type)


def names_of(module: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter and buffer."""
    names: dict[int, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return [*names.values()]


def run_itself(called: Called, micro_batches: Sequence[MicroBatch]) -> Results:
    """Trains some steps by plain SGD and evaluates after each.

    Returns:
        What the keys above name: outputs, gradients, which parameters have one, and buffers, in order. A tensor with
        several names stands under each.
    """
    found: Results = {}
    module = called.module
    for step in range(STEPS):
        called.train()
        with _batchnorm_by_mini_batch(module):
            for number, (inputs, targets) in enumerate(micro_batches):
                output = called(*copies(inputs))
                found[output_key(step, number, True)] = output.detach().clone()
                (loss_of((output,), targets)[0] / (M * EXAMPLES)).backward()  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters(remove_duplicate=False):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            found[gradient_key(step, name)] = gradient
            found[trained_key(step, name)] = torch.tensor(parameter.requires_grad)
        update(module.parameters())
        found |= {buffer_key(step, n): b.clone() for n, b in module.named_buffers(remove_duplicate=False)}
        called.eval()
        with torch.no_grad():
            for number, (inputs, _) in enumerate(micro_batches):
                found[output_key(step, number, False)] = called(*copies(inputs)).clone()
    return found


@torch.no_grad()
def update(parameters: Any) -> None:
    """Takes one step of plain SGD and forgets the gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=-RATE)
            parameter.grad = None


@dataclass
class _Statistics:
    """Holds what a BatchNorm has normalised in one mini-batch, as count, sum and sum of squares."""

    mean: Tensor
    variance: Tensor
    momentum: float
    before: tuple[Tensor, Tensor]
    sums: list[Tensor] = field(default_factory=list)

    def note(self, x: Tensor) -> None:
        wide = x.detach().double().transpose(0, 1).flatten(1)
        count = torch.full_like(wide[:, 0], wide.shape[1])
        self.sums.append(torch.stack([count, wide.sum(1), wide.square().sum(1)]))

    def apply(self, momentum: float) -> None:
        """Sets the moving averages by the mean and the population variance of the whole mini-batch."""
        count, total, squares = torch.stack(self.sums).sum(0)
        mean = total / count
        for kept, before, new in zip(
            (self.mean, self.variance), self.before, (mean, squares / count - mean**2), strict=True
        ):
            kept.copy_(before.double().lerp(new, momentum).to(kept.dtype))


@contextmanager
def _batchnorm_by_mini_batch(module: nn.Module) -> Iterator[None]:
    """Lets torch's own BatchNorm run, then sets its moving averages as the paper (section 2.2) has them.

    They follow the statistics of the mini-batch, over all its micro-batches, once; torch's follow each call. This is
    the one difference from torch that the tool documents.
    """
    batchnorms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    counted = [None if part.num_batches_tracked is None else part.num_batches_tracked.clone() for part in batchnorms]
    seen: dict[int, _Statistics] = {}
    usual = torch.batch_norm

    def noted(x: Tensor, *rest: Any) -> Tensor:
        _, _, mean, variance, training, momentum = rest[:6]
        if training and mean is not None:
            before = mean.clone(), variance.clone()
            seen.setdefault(id(mean), _Statistics(mean, variance, momentum, before)).note(x)
        return usual(x, *rest)

    with patch.object(torch, "batch_norm", noted):
        yield
    shares = {key: statistics.momentum for key, statistics in seen.items()}
    for part, count in zip(batchnorms, counted, strict=True):
        if id(part.running_mean) in seen and count is not None and part.num_batches_tracked is not None:
            part.num_batches_tracked.copy_(count + 1)
            if part.momentum is None:
                shares[id(part.running_mean)] = 1 / (int(count) + 1)
    for key, statistics in seen.items():
        statistics.apply(shares[key])
