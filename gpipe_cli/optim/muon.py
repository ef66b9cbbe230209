"""Defines Muon for a whole model: hidden matrices by Muon, the other parameters by another optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..typed_section import Count, NotNegative, ShareOrZero
from .optimizers import SteppedByGroup

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial: the steepest at zero (Jordan et al. 2024)
SMALLEST_NORM = 1e-7
STACKED, MOST = 1 << 21, 16  # most weights, and most matrices, that are multiplied together


class Muon(SteppedByGroup):
    """Updates groups with the key ``muon`` by Muon (Jordan et al. 2024), the others by an optimizer that is given.

    The momentum of a matrix becomes a matrix with the same directions whose singular values are all about 1, so that
    each direction is learnt at the same speed. The updates are those of `torch.optim.Muon`, which always computes in
    bfloat16; CPUs without that type emulate it, 20 times slower than float32. A convolution is a matrix with a row for
    each output channel.

    Matrices of one shape are multiplied together. On CPUs that gives the bits of one at a time. Elsewhere the kernel,
    and so the bits, may depend on how many there are, and this number on the cut. So there it is always the same:
    matrices of zeros fill the places that are left.

    Args:
        params: groups of parameters.
        rest: function that makes the optimizer of the other parameters.
        lr: learning rate of the other parameters; a schedule sets it.
        matrix_lr_factor: learning rate of the matrices as a multiple of lr.
        momentum: decay of the average of the matrices' gradients, which is used by Nesterov's rule.
        weight_decay: share of the matrices, times their learning rate, that is subtracted directly.
        iterations: number of Newton-Schulz iterations, towards singular values of 1.
    """

    # Entries before those of optimizer.groups: {match: ..., muon: false} gives matrices to the rest.
    FIRST_GROUPS = ({"only": "hidden", "muon": True},)

    def __init__(
        self,
        params: ParamsT,
        rest: Callable[..., Optimizer],
        lr: NotNegative = 0.005,
        matrix_lr_factor: NotNegative = 4.0,
        momentum: ShareOrZero = 0.95,
        weight_decay: NotNegative = 0.0,
        iterations: Count = 5,
    ) -> None:
        if "lr" in getattr(rest, "keywords", ()):
            raise ValueError("rest.lr would be ignored: lr is the rate of the others, matrix_lr_factor times it Muon's")
        super().__init__(params, {"lr": lr, "muon": False})
        for group in self.param_groups:
            if group["muon"]:
                if any(parameter.dim() < 2 for parameter in group["params"]):
                    raise ValueError("optimizer.groups has muon: true for a parameter with fewer than two dimensions")
                group["lr"] *= matrix_lr_factor
                group.update({"weight_decay": weight_decay, "momentum": momentum, "iterations": iterations} | group)
        others = [group for group in self.param_groups if not group["muon"]]
        self._rest = rest(others, lr=lr) if others else None
        if self._rest is not None:
            self._rest.state = self.state  # one state and the same groups: for checkpoints and the schedule

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; the gradients stay unchanged."""
        loss = super().step(closure)
        if self._rest is not None:
            self._rest.step()
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Updates the matrices of a Muon group, those of one shape together; leaves other groups to the rest."""
        alike: dict[Any, list[Tensor]] = {}
        for parameter in parameters if group["muon"] else ():
            alike.setdefault(parameter.shape, []).append(parameter)
        for each in alike.values():
            together = min(MOST, max(1, STACKED // each[0].numel()))
            for start in range(0, len(each), together):
                self._update_alike(group, each[start : start + together], together)

    def _update_alike(self, group: dict[str, Any], parameters: list[Tensor], size: int) -> None:
        """Updates matrices of one shape.

        Args:
            size: most matrices that are multiplied together; outside CPUs zeros fill up to it.
        """
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            average = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
            directions.append(parameter.grad.lerp(average, group["momentum"]).flatten(1))
        rows, columns = directions[0].shape
        rate = group["lr"] * max(1, rows / columns) ** 0.5
        if not parameters[0].is_cpu:
            directions += [torch.zeros_like(directions[0])] * (size - len(directions))
        updates = orthogonal(torch.stack(directions), group["iterations"])
        for parameter, update in zip(parameters, updates, strict=False):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.reshape(parameter.shape), alpha=-rate)


def orthogonal(matrices: Tensor, iterations: int) -> Tensor:
    """Returns matrices [n, a, b] with the same singular vectors, and singular values between about 0.7 and 1.2.

    An iteration (Newton-Schulz) maps every singular value s to a·s + b·s³ + c·s⁵ by products of matrices alone, which
    are faster than finding the singular values. The type is bfloat16 where the device multiplies it fast, else the
    matrices' own.
    """
    if not matrices.is_cpu or torch.cpu._is_avx512_bf16_supported():
        matrices = matrices.bfloat16()
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # so that x xᵀ is the smaller of the two squares
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)  # no singular value above 1
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        square = x @ x.mT
        # a x + (b square + c square²) x
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
