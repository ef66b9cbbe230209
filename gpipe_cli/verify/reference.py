"""States once more, independently of the trainer, what defines a step: seeds, learning rate, update, weight average.

gpipe-verify compares the trainer with these. Optimizers and schedules are asked themselves, one parameter at a time and
from their beginning: no code that divides, sums, saves or resumes takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ..factory.build import build_lr_schedule, build_optimizer
from ..models.traced.recording import seeded

Section = Mapping[str, Any]
LONGEST_WARM_UP = 100_000  # steps


def _digest(numbers: tuple[int, ...], size: int) -> bytes:
    return blake2b(b"".join(number.to_bytes(8, "little", signed=True) for number in numbers), digest_size=size).digest()


def noise_seed(seed: int, step: int, replica: int, micro_batch: int, layer: int) -> int:
    """Returns the seed of a layer's dropout: 63 bits that depend on all five numbers (docs/design.md)."""
    block, place = divmod(layer, 8)
    eight = _digest((2, seed, step, replica, micro_batch, block), 64)
    return int.from_bytes(eight[8 * place : 8 * place + 8], "little") // 2


def weights_drawn(seed: int, layer: int) -> AbstractContextManager[None]:
    """Seeds the generators of torch's CPU, numpy and Python for a layer's initial weights; restores them afterwards."""
    return seeded(int.from_bytes(_digest((1, seed, layer), 8), "little") // 2)


def learning_rate(optimizer: Section, lr_schedule: Section, n: int) -> float | None:
    """Returns the learning rate of update n = 1, 2, …; None where the optimizer has none."""
    made = build_optimizer(optimizer, [nn.Parameter(torch.zeros(1, 1))])
    if "lr" not in made.param_groups[0]:
        return None
    schedule = build_lr_schedule(lr_schedule, made)
    for _ in range(n - 1):
        made.step()
        schedule.step()
    return float(made.param_groups[0]["lr"])


def below_peak(optimizer: Section, lr_schedule: Section, n: int) -> float:
    """Returns how many times higher the peak of the learning rate is than that of update n; 1 where nothing says it."""
    schedule = build_lr_schedule(lr_schedule, build_optimizer(optimizer, [nn.Parameter(torch.zeros(1, 1))]))
    if not isinstance(schedule, LambdaLR):
        return 1.0
    factor = schedule.lr_lambdas[0]
    return max(map(factor, range(LONGEST_WARM_UP))) / (factor(n - 1) or 1.0)


def update(
    section: Section, rate: float | None, weight: Tensor, state: Section, gradient: Tensor
) -> tuple[Tensor, Any]:
    """Returns weight and state of a parameter after one update by the section `optimizer`, alone in one of its own.

    Args:
        rate: the learning rate.
        state: of the optimizer before, by name; empty before the first update.
        gradient: clipped.
    """
    keys = {key: value for key, value in section.items() if key != "decay_only"}
    keys |= {} if rate is None else {"lr": rate}
    if section.get("decay_only") == "matrices" and weight.dim() < 2:
        keys["weight_decay"] = 0.0
    parameter = nn.Parameter(weight.clone())
    alone = build_optimizer(keys, [parameter])
    if state:
        alone.state[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    parameter.grad = gradient.clone()
    alone.step()
    return parameter.detach(), dict(alone.state[parameter])


def average(decay: float, updates: int, before: Tensor, weight: Tensor) -> Tensor:
    """Returns the moving average after an update, of the average before it and the weight after it.

    Args:
        decay: `trainer.average`.
        updates: before this one.
    """
    share = max(1 - decay, 9 / (10 + updates))
    return torch.lerp(before, weight.to(before), share)
