"""Defines learning rate schedules as torch `LambdaLR`: factors of `optimizer.lr`. Chosen by `lr_schedule._target_`.

Step t counts from 0, and the first update has a learning rate above zero.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..typed_section import Count, CountOrZero, NotNegative, Part, PartAboveZero, Positive


def inverse_sqrt(optimizer: Optimizer, warmup_steps: Count) -> LambdaLR:
    """Rises linearly over `warmup_steps` updates to `optimizer.lr`, then falls with 1/√(t+1)."""
    return LambdaLR(optimizer, lambda t: min((t + 1) / warmup_steps, math.sqrt(warmup_steps / (t + 1))))


def transformer(optimizer: Optimizer, d_model: Count, factor: NotNegative, warmup_steps: Count) -> LambdaLR:
    """Multiplies `optimizer.lr` (often 1) by `factor` · d_model^-0.5 · min((t+1)^-0.5, (t+1) · warmup_steps^-1.5)."""
    return LambdaLR(optimizer, lambda t: factor * d_model**-0.5 * min((t + 1) ** -0.5, (t + 1) * warmup_steps**-1.5))


def cosine(optimizer: Optimizer, steps: Count, warmup_steps: CountOrZero = 0, final: NotNegative = 0.0) -> LambdaLR:
    """Rises linearly to `optimizer.lr`, then falls along half a cosine to `final` of it after `steps` updates.

    Args:
        warmup_steps: number of updates of the rise; at most half of `steps`, so that a short run has both.
    """
    warmup_steps = min(warmup_steps, steps // 2)

    def fall(t: int) -> float:
        done = min(1.0, (t - warmup_steps) / (steps - warmup_steps))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, _with_warmup(warmup_steps, fall))


def constant(optimizer: Optimizer, warmup_steps: CountOrZero = 0) -> LambdaLR:
    """Rises linearly over `warmup_steps` updates to `optimizer.lr`, and stays there."""
    return LambdaLR(optimizer, _with_warmup(warmup_steps, lambda t: 1.0))


def exponential(
    optimizer: Optimizer, rate: PartAboveZero, decay_every: Positive, warmup_steps: CountOrZero = 0, floor: Part = 0.0
) -> LambdaLR:
    """Falls in steps: times `rate` after every `decay_every` updates, never below `floor` of `optimizer.lr`.

    Over the first `warmup_steps` updates it rises linearly to `optimizer.lr` instead. The decay counts from the first
    update, also during the warm-up, as in TensorFlow's AmoebaNet.

    Args:
        decay_every: number of updates; need not be whole, such as 2.4 epochs.
    """
    return LambdaLR(optimizer, _with_warmup(warmup_steps, lambda t: max(floor, rate ** int(t // decay_every))))


def exponential_epochs(
    optimizer: Optimizer,
    rate: PartAboveZero,
    decay_epochs: Positive,
    warmup_epochs: NotNegative,
    floor: Part,
    examples: Count,
    batch_size: Count,
) -> LambdaLR:
    """Decays as `exponential`, with times in epochs instead of updates.

    Args:
        examples: number of examples in an epoch.
        batch_size: examples of a mini-batch.
    """
    steps = examples / batch_size
    return exponential(optimizer, rate, decay_epochs * steps, round(warmup_epochs * steps), floor)


def _with_warmup(warmup_steps: int, after: Callable[[int], float]) -> Callable[[int], float]:
    """Returns the factor of step t: a linear rise to 1 over the warm-up, then ``after(t)``."""
    return lambda t: (t + 1) / warmup_steps if t < warmup_steps else after(t)
