"""Defines the base of our optimizers, and TFRMSprop. Chosen by `optimizer._target_`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..typed_section import NotNegative, ShareOrZero


class SteppedByGroup(Optimizer):
    """Updates one group of parameters at a time; a subclass defines `_update`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; the gradients stay unchanged."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Updates the group's ``parameters``, one or more, which all have a gradient."""
        raise NotImplementedError


class TFRMSprop(SteppedByGroup):
    """Implements RMSProp as TensorFlow defines it, with which AmoebaNet was trained (paper, section 4).

    For a weight w with gradient g, mean square s and momentum m, in this order:

        g ← g + weight_decay · w
        s ← decay · s + (1 − decay) · g²           s = 1 at first
        m ← momentum · m + lr · g / √(s + eps)     m = 0 at first
        w ← w − m

    `torch.optim.RMSprop` has eps outside the root, s = 0 at first, and multiplies by lr only when it subtracts m. With
    eps of 0.1 or 1.0, as usual here, that is another optimizer, and a lower lr also shrinks the past updates in m.

    Args:
        params: parameters or groups of them.
        lr: learning rate; a schedule sets it.
        decay: decay of the mean square; torch calls it alpha.
        momentum: decay of the past updates.
        eps: number added under the root.
        weight_decay: L2; its half times w² is added to the loss.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: NotNegative = 0.01,
        decay: ShareOrZero = 0.9,
        momentum: ShareOrZero = 0.9,
        eps: NotNegative = 1e-3,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        defaults = {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Updates all parameters of a group at once: a few GPU kernels, however many parameters there are."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["mean_square"], state["momentum_buffer"] = torch.ones_like(parameter), torch.zeros_like(parameter)
        squares = [self.state[parameter]["mean_square"] for parameter in parameters]
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        torch._foreach_mul_(squares, group["decay"])
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - group["decay"])
        roots = torch._foreach_add(squares, group["eps"])
        torch._foreach_sqrt_(roots)
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_addcdiv_(momenta, gradients, roots, value=group["lr"])
        torch._foreach_sub_(parameters, momenta)
