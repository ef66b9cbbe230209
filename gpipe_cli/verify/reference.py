"""States once more, independently of the trainer, what defines a step: seeds, learning rate, update, weight average.

gpipe-verify compares the trainer with these. Nothing here may call the code that it is compared with; optimizers and
schedules of torch itself are taken from torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from ..factory.build import build_lr_schedule, build_optimizer
from ..models.traced.recording import seeded

State = dict[str, Any]  # of one parameter in an optimizer
NEAREST_ZERO = 1e-3  # Adafactor's smallest scale of an update by its parameter

# -- random numbers ----------------------------------------------------------------------------------------------------


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


# -- learning rate -----------------------------------------------------------------------------------------------------

Section = Mapping[str, Any]


def _warmed_up(keys: Section, n: int, after: float) -> float:
    warm_up = keys.get("warmup_steps", 0)
    return n / warm_up if n <= warm_up else after


def _inverse_sqrt(keys: Section, n: int) -> float:
    return n / keys["warmup_steps"] if n < keys["warmup_steps"] else math.sqrt(keys["warmup_steps"] / n)


def _transformer(keys: Section, n: int) -> float:
    warm_up = keys["warmup_steps"]
    return float(keys["factor"] / math.sqrt(keys["d_model"] * (n if n > warm_up else warm_up**3 / n**2)))


def _cosine(keys: Section, n: int) -> float:
    warm_up, final = min(keys.get("warmup_steps", 0), keys["steps"] // 2), keys.get("final", 0.0)
    way = min(max(n - 1 - warm_up, 0) / (keys["steps"] - warm_up), 1.0)
    return _warmed_up({"warmup_steps": warm_up}, n, final + (1 - final) * math.cos(math.pi * way / 2) ** 2)


def _exponential(keys: Section, n: int) -> float:
    stairs = math.floor((n - 1) / keys["decay_every"])
    return _warmed_up(keys, n, max(keys["rate"] ** stairs, keys.get("floor", 0.0)))


def _exponential_epochs(keys: Section, n: int) -> float:
    epoch = keys["examples"] / keys["batch_size"]
    steps = {"decay_every": keys["decay_epochs"] * epoch, "warmup_steps": round(keys["warmup_epochs"] * epoch)}
    return _exponential({**keys, **steps}, n)


OURS = "gpipe_cli.optim.lr_schedules."
FACTORS: dict[str, Callable[[Section, int], float]] = {  # of optimizer.lr, in update n = 1, 2, …
    f"{OURS}inverse_sqrt": _inverse_sqrt,
    f"{OURS}transformer": _transformer,
    f"{OURS}cosine": _cosine,
    f"{OURS}constant": lambda keys, n: _warmed_up(keys, n, 1.0),
    f"{OURS}exponential": _exponential,
    f"{OURS}exponential_epochs": _exponential_epochs,
}


def learning_rate(optimizer: Section, lr_schedule: Section, n: int) -> float | None:
    """Returns the learning rate of update n = 1, 2, …; None where the optimizer has none.

    Schedules of this project are closed formulas. Another is asked itself, from its beginning.
    """
    made = build_optimizer(optimizer, [nn.Parameter(torch.zeros(1, 1))])
    rate = made.param_groups[0].get("lr")
    if rate is None:
        return None
    formula = FACTORS.get(lr_schedule["_target_"])
    if formula is not None:
        return float(rate) * formula(lr_schedule, n)
    schedule = build_lr_schedule(lr_schedule, made)
    for _ in range(n - 1):
        made.step()
        schedule.step()
    return float(made.param_groups[0]["lr"])


def peak_rate(optimizer: Section, lr_schedule: Section, steps: int) -> float | None:
    """Returns the highest learning rate of some steps; None where no formula says it."""
    formula = FACTORS.get(lr_schedule["_target_"])
    if formula is None or "lr" not in optimizer:
        return None
    return float(optimizer["lr"]) * max(formula(lr_schedule, n) for n in range(1, steps + 1))


# -- update ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """Holds one parameter before or after an update.

    Attributes:
        weight: its value.
        state: of the optimizer, by name; empty before the first update.
    """

    weight: Tensor
    state: State


def update(section: Section, rate: float | None, before: Update, gradient: Tensor) -> Update:
    """Returns a parameter after one update by the section `optimizer`, alone in an optimizer of its own.

    Args:
        rate: the learning rate.
        gradient: clipped.
    """
    keys = {key: value for key, value in section.items() if key not in ("_target_", "decay_only")}
    keys |= {} if rate is None else {"lr": rate}
    if section.get("decay_only") == "matrices" and before.weight.dim() < 2:
        keys["weight_decay"] = 0.0
    target = section["_target_"]
    if target in FORMULAS:
        return FORMULAS[target](keys, before, gradient)
    parameter = nn.Parameter(before.weight.clone())
    if target.startswith("torch.optim."):
        one: Any = getattr(torch.optim, target.rpartition(".")[2])([parameter], **keys)
    else:
        one = build_optimizer({"_target_": target, **keys}, [parameter])
    if before.state:
        one.state[parameter] = {key: copied(value) for key, value in before.state.items()}
    parameter.grad = gradient.clone()
    one.step()
    return Update(parameter.detach(), dict(one.state[parameter]))


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tf_rmsprop(keys: Section, before: Update, gradient: Tensor) -> Update:
    weight, given = before.weight, gradient + keys.get("weight_decay", 0.0) * before.weight
    decay = keys.get("decay", 0.9)
    mean_square = before.state.get("mean_square", torch.ones_like(weight)) * decay + (1 - decay) * given**2
    momentum = before.state.get("momentum_buffer", torch.zeros_like(weight)) * keys.get("momentum", 0.9)
    momentum = momentum + keys.get("lr", 0.01) * given / torch.sqrt(mean_square + keys.get("eps", 1e-3))
    return Update(weight - momentum, {"mean_square": mean_square, "momentum_buffer": momentum})


def _adafactor(keys: Section, before: Update, gradient: Tensor) -> Update:
    old, weight, step = before.state, before.weight, int(before.state.get("step", 0)) + 1
    rate, beta1, fixed = keys.get("lr", 1.0), keys.get("beta1", 0.9), keys.get("beta2")
    beta2 = 1 - step ** -keys.get("decay_exponent", 0.8) if fixed is None else fixed
    squares = gradient**2 + keys.get("eps", 1e-30)
    state: State = {"step": step}
    if weight.dim() < 2:
        state["square"] = beta2 * old.get("square", 0.0) + (1 - beta2) * squares
        change = gradient / torch.sqrt(state["square"])
    else:
        state["rows"] = beta2 * old.get("rows", 0.0) + (1 - beta2) * squares.mean(-1, keepdim=True)
        state["columns"] = beta2 * old.get("columns", 0.0) + (1 - beta2) * squares.mean(-2, keepdim=True)
        rows = state["rows"].double()
        change = gradient / torch.sqrt(rows * state["columns"].double() / rows.mean(-2, keepdim=True)).to(gradient)
    if keys.get("clip", 1.0) is not None:
        change = change / max(1.0, _root_mean_square(change) / keys.get("clip", 1.0))
    change = rate * change
    if keys.get("parameter_scale"):
        change = change * max(NEAREST_ZERO, _root_mean_square(weight))
    if beta1:
        change = state["momentum"] = beta1 * old.get("momentum", 0.0) + (1 - beta1) * change
    return Update(weight * (1 - rate * keys.get("weight_decay", 0.0)) - change, state)


def _root_mean_square(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.double().square().mean()))


FORMULAS: dict[str, Callable[[Section, Update, Tensor], Update]] = {
    "gpipe_cli.optim.optimizers.TFRMSprop": _tf_rmsprop,
    "gpipe_cli.optim.adafactor.Adafactor": _adafactor,
}


def average(decay: float, updates: int, before: Tensor, weight: Tensor) -> Tensor:
    """Returns the moving average after an update, of the average before it and the weight after it.

    Args:
        decay: `trainer.average`.
        updates: before this one.
    """
    share = max(1 - decay, 9 / (10 + updates))
    return torch.lerp(before, weight.to(before), share)
