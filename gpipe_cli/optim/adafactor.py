"""Defines Adafactor with momentum, the optimizer of the paper's translation models. Chosen by `optimizer._target_`."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..typed_section import NotNegative, Positive, ShareOrZero
from .optimizers import SteppedByGroup

LEAST_SCALE = 1e-3  # smallest scale with parameter_scale, for parameters near zero


class Adafactor(SteppedByGroup):
    """Implements Adafactor (Shazeer and Stern, arXiv 1804.04235) as in Tensor2Tensor and Lingvo, with a first moment.

    For a weight w with gradient g, in step t = 1, 2, …:

        b ← beta2, or 1 − t^−decay_exponent where beta2 is None
        V ← b · V + (1 − b) · (g² + eps)     of a matrix only the means of rows R and columns C: V = R·C / mean(R)
        u ← g / √V
        u ← u / max(1, rms(u) / clip)
        u ← lr · u, times max(rms(w), 0.001) with parameter_scale
        m ← beta1 · m + (1 − beta1) · u      includes the learning rate
        w ← w − lr · weight_decay · w − m

    `torch.optim.Adafactor` has no momentum, always scales by the parameter, and takes the smaller of lr and 1/√t.
    Parameters share no state, so the result does not depend on the cut.

    Parameters of two or more dimensions count as matrices; the last two are factored. Memory: one number for each
    weight (m; none with beta1 = 0) and one for each row and column, where Adam needs two for each weight.

    Args:
        params: parameters or groups of them.
        lr: learning rate; a schedule sets it.
        beta1: decay of the momentum; 0: none.
        beta2: decay of the squares; None: 1 − t^−decay_exponent, which rises to 1.
        decay_exponent: exponent by which beta2 rises.
        eps: number added to the squares.
        clip: the largest root mean square of an update, before the learning rate; None: no limit.
        parameter_scale: True to multiply updates by the root mean square of the weights before the step.
        weight_decay: share of the weights, times lr, that is subtracted directly, not through the gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: NotNegative = 1.0,
        beta1: ShareOrZero = 0.9,
        beta2: ShareOrZero | None = None,
        decay_exponent: Positive = 0.8,
        eps: NotNegative = 1e-30,
        clip: Positive | None = 1.0,
        parameter_scale: bool = False,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        keys = {"beta1": beta1, "beta2": beta2, "decay_exponent": decay_exponent, "eps": eps, "clip": clip}
        more = {"lr": lr, "parameter_scale": parameter_scale, "weight_decay": weight_decay}
        super().__init__(params, {**keys, **more})

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Updates the parameters one after another, by the formulas of the class, in their order."""
        for parameter in parameters:
            state, gradient = self.state[parameter], cast(Tensor, parameter.grad)
            state["step"] = state.get("step", 0) + 1
            beta2 = 1 - state["step"] ** -group["decay_exponent"] if group["beta2"] is None else group["beta2"]
            update = _over_root(state, gradient, gradient.square() + group["eps"], beta2)
            if group["clip"] is not None:
                update /= (_rms(update) / group["clip"]).clamp(min=1.0)
            update *= group["lr"]
            if group["parameter_scale"]:
                update *= _rms(parameter).clamp(min=LEAST_SCALE)
            if group["beta1"]:
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                update = state["momentum"].lerp_(update, 1 - group["beta1"])
            if group["weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(update)


def _over_root(state: dict[str, Any], gradient: Tensor, squares: Tensor, beta2: float) -> Tensor:
    """Moves the average V of the squares on, and returns the gradient divided by √V.

    Of a matrix only the means of rows R and of columns C are kept: V = R·C / mean(R).

    Where a row and a column of zeros meet, R and C are both eps and their product is 0 in float32, so the gradient is
    divided by the two roots one after the other.
    """
    if squares.dim() < 2:
        if "square" not in state:
            state["square"] = torch.zeros_like(squares)
        return gradient / cast(Tensor, state["square"].lerp_(squares, 1 - beta2)).sqrt()
    if "rows" not in state:
        state["rows"], state["columns"] = torch.zeros_like(squares[..., :1]), torch.zeros_like(squares[..., :1, :])
    rows, columns = state["rows"], state["columns"]
    rows.lerp_(squares.mean(-1, keepdim=True), 1 - beta2)
    columns.lerp_(squares.mean(-2, keepdim=True), 1 - beta2)
    by_rows = gradient * (rows.mean(-2, keepdim=True).sqrt() / rows.sqrt())
    return cast(Tensor, by_rows / columns.sqrt())


def _rms(tensor: Tensor) -> Tensor:
    """Returns the root mean square, a scalar."""
    return tensor.square().mean().sqrt()
