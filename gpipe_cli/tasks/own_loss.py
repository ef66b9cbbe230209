"""Defines the tasks of a model that computes its own loss, and of a loss that is a plain function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..micro_batch import Tensors
from ..typed_section import Names
from .base import Task


class OwnLossTask(Task):
    """Takes the model's output for the mean loss of a micro-batch's targets, and weights it by their number.

    The data source's targets are the last inputs of the model (`targets_become`), so that it can compute the loss.

    Args:
        targets_become: arguments of the module that the targets become; read by model=module.
        ignored: the target that the model's mean leaves out, beside -100.
    """

    unit = "tokens"

    def __init__(self, targets_become: Names = ("labels",), ignored: int | None = -100) -> None:
        self.targets_become, self.ignored = targets_become, ignored

    def weight(self, targets: Tensors) -> float:
        """Returns the number of targets that count."""
        return float(self._count(targets[0]))

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """Returns (the model's mean loss times the number of targets that count; nothing).

        Raises:
            ValueError: the model returns more than one number.
        """
        mean = outputs[0]
        if mean.numel() != 1:
            raise ValueError(
                f"task=own_loss takes the model's output for its loss, but it has the shape {list(mean.shape)}: name "
                "the loss with model.output=loss, or leave out task=own_loss"
            )
        count = self._count(targets[0])  # the mean of no targets is not a number
        total = torch.where(count > 0, mean.reshape(()) * count, 0.0)
        return total, torch.zeros(0, dtype=torch.float64, device=mean.device)

    def _count(self, target: Tensor) -> Tensor:
        ignored = (target == -100) if self.ignored is None else (target == -100) | target.eq(self.ignored)
        return (~ignored).sum()


class LossFunctionTask(Task):
    """Takes a function's result for the mean loss of a micro-batch's examples, and weights it by their number.

    Args:
        function: gets the model's outputs and the targets, each a tensor, or a tuple where there are several.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """Returns (the function's mean loss times the number of examples; nothing).

        Raises:
            ConfigurationError: the function returns something else than one number.
        """
        mean = self._function(*(part[0] if len(part) == 1 else part for part in (outputs, targets)))
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            shown = f"a tensor of shape {list(mean.shape)}" if isinstance(mean, Tensor) else f"a {type(mean).__name__}"
            raise ConfigurationError(
                f"task._target_: the loss function returned {shown}: it must return one number, the mean over the "
                "examples of a micro-batch, as a tensor"
            )
        return mean.reshape(()) * len(targets[0]), torch.zeros(0, dtype=torch.float64, device=mean.device)
