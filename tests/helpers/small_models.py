"""Defines small models and a training loop without the engine, for tests of the engine."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from schedule_rules import scheduled
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.subject import WIDTH, WORDS
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.pipeline.cell import BuiltLayer, Cell, build_layer
from gpipe_cli.pipeline.engine import Engine
from gpipe_cli.pipeline.messages.transport import Transport
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.step import StepPlan, StepRecord

CPU = torch.device("cpu")
Steps = Sequence[dict[str, Any]]


class Branches(nn.Module):
    """Maps ids to two modalities; the first is dropped, without gradient, for some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self.a(ids)
        return (torch.zeros_like(a) if ids[0, 0] % 2 else a), self.b(ids), ids


class Passed(nn.Module):
    """Is passed over by some micro-batches; looks at its inputs through a trunk under no_grad, and has a spare part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.trunk, self.spare = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        a, b, ids, *_ = inputs
        with torch.no_grad():
            seen = self.trunk(b).tanh()
        return a if ids[0, 1] % 2 else a + self.linear(a), b, ids, seen


class Choose(nn.Module):
    """Uses the second modality alone in some micro-batches, and neither with its gradient in others."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        a, b, ids, seen = inputs
        x = b if ids[0, 2] % 2 else a * 3 + b
        return self.out((x.detach() if ids[0, 3] % 2 else x) + seen)


def varying_model() -> list[LayerBuilder]:
    """Returns layers whose gradients take other ways in every micro-batch."""
    layers = {"branches": Branches, "first": Passed, "second": Passed, "choose": Choose}
    return [LayerBuilder(name, build) for name, build in layers.items()]


def token_loss(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Returns the sum over the non-padding tokens, and the number of tokens."""
    (logits,), (wanted,) = outputs, targets
    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="sum")
    return loss, torch.tensor([float(wanted.numel())], dtype=torch.float64)


def weight_of(micro_batches: Sequence[MicroBatch]) -> float:
    return float(sum(int((targets[0] != 0).sum()) for _, targets in micro_batches))


def build_all(builders: Sequence[LayerBuilder], seed: int = 5) -> list[BuiltLayer]:
    return [BuiltLayer(i, b.name, build_layer(b, i, seed, CPU)) for i, b in enumerate(builders)]


def engine_of(
    layers: Sequence[BuiltLayer],
    cuts: Sequence[int],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    compiles: bool = False,
    placement: Sequence[int] | None = None,
    transport: Transport | None = None,
    worker: int = 0,
) -> Engine:
    """Returns the engine of a worker, which has all cells if none is given; ``cuts``: the number of layers of each."""
    noise, taken, placement = NoiseSource(1, 0, CPU), iter(layers), placement or (0,) * len(cuts)
    cells = [Cell(k, [next(taken) for _ in range(size)], noise, None, compiles) for k, size in enumerate(cuts)]
    own = [cell for cell, of in zip(cells, placement, strict=True) if of == worker]
    return Engine(own, placement, transport, token_loss, 1, CPU, autocast)


def train_step(
    engine: Engine, kind: str, remat: str, batch: Sequence[MicroBatch], step: int = 0, weight: float = 0, **others: Any
) -> StepRecord:
    """Runs one training step of an engine that has all cells.

    Args:
        weight: divisor of the loss; 0: the number of tokens.
        others: other arguments of `Engine.train_step`.
    """
    signatures = tuple(tuple(inputs[0].shape) for inputs, _ in batch)
    plan = StepPlan(signatures, weight or weight_of(batch), step=step, steps=step + 1, micro_batches=batch)
    return engine.train_step(scheduled(kind, engine.placement, len(batch), remat)[0], plan, **others)


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """Returns the gradients of all parameters that have one, by name."""
    named = (named for cell in engine.cells.values() for named in cell.parameters())
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def seen_after(cells: Sequence[Cell], record: StepRecord) -> dict[str, dict[Any, Any]]:
    """Returns losses, gradients and buffers after a step, of the cells that are here."""
    held = dict(named for cell in cells for named in cell.parameters())
    layers = [layer for cell in cells for layer in cell.layers]
    buffers = {f"{layer.name}.{name}": b.clone() for layer in layers for name, b in layer.module.named_buffers()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in held.items()}
    return {"losses": {k: v.item() for k, v in record.losses.items()}, "gradients": gradients, "buffers": buffers}


def descend(parameters: Iterable[nn.Parameter], rate: float) -> None:
    """Takes a step of gradient descent, and forgets the gradients."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
                parameter.grad = None


def other_values(seen: Steps, reference: Steps, parts: Sequence[str], close: tuple[float, float]) -> list[str]:
    """Returns the parts of `seen_after`'s steps that differ from those of the reference.

    Args:
        close: relative and absolute tolerance of numbers; (0, 0): equal bits.
    """
    return [
        f"step {step}: {part} of {name} is {value}, not {then[part][name]}"
        for step, (now, then) in enumerate(zip(seen, reference, strict=True))
        for part in parts
        for name, value in now[part].items()
        if not _is_close(value, then[part][name], *close)
    ]


def _is_close(value: Any, expected: Any, rtol: float, atol: float) -> bool:
    if not isinstance(value, Tensor) or expected is None:
        return value is expected or value == expected
    exact = torch.equal(value, expected)
    return exact or (rtol > 0 and torch.allclose(value, expected, rtol, atol * max(1.0, expected.abs().max().item())))


def plain_step(layers: Sequence[BuiltLayer], micro_batches: Sequence[MicroBatch], step: int, seed: int = 1) -> float:
    """Runs forward and backward of a mini-batch without engine, cells or schedule; returns its loss."""
    noise = NoiseSource(seed, 0, CPU)
    weight, total = weight_of(micro_batches), 0.0
    for number, (inputs, targets) in enumerate(micro_batches):
        values: object = inputs[0]
        loss = torch.zeros(())
        for layer in layers:
            noise.seed(noise.seeds(step, number, [layer.index])[0])
            values = layer.module(values)
            if hasattr(layer.module, "auxiliary_loss"):
                loss = loss + layer.module.auxiliary_loss(values, targets)
        loss = (loss + token_loss((values,), targets)[0]) / weight  # type: ignore[arg-type]  # the head's tensor
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own annotation
        total += loss.item()
    return total
