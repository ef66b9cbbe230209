"""Defines the tasks of a model that computes its own loss, and of a loss that is a plain function."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..micro_batch import MicroBatch, Tensors
from ..typed_section import Names
from .base import Task
from .cross_entropy import widened

COMPARISONS = 4  # micro-batches at the start whose loss is compared with that of its parts
ROUNDING, HALF_ROUNDING = 1e-3, 0.03  # relative differences, the second of 16-bit outputs
DEPENDS_ON_M = (
    "the loss of {} examples is {:.6g}, but the mean of its parts is {:.6g}: losses and gradients depend on M. If it "
    "is a mean over other things, as tokens, say how many: "
    "Pipeline.of(weight=lambda targets: (targets != -100).sum()), or for gpipe-train a task that returns sums "
    "(docs/your-own-model.md)"
)


class OwnLossTask(Task):
    """Regards the model's output as the mean loss over a micro-batch's targets, and multiplies it by their number.

    The data source's targets are the last inputs of the model (`targets_become`), so that it can compute the loss.

    Args:
        targets_become: names of the module's arguments that the targets become; read by model=module.
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
        total = torch.where(count > 0, widened(mean.reshape(())) * count, 0.0)
        return total, torch.zeros(0, dtype=torch.float64, device=mean.device)

    def _count(self, target: Tensor) -> Tensor:
        """Returns the number of targets that count, a scalar on their device."""
        ignored = (target == -100) if self.ignored is None else (target == -100) | target.eq(self.ignored)
        return (~ignored).sum()


class LossFunctionTask(Task):
    """Regards a function's result as the mean loss over a micro-batch's examples, and multiplies it by their number.

    Args:
        function: function (outputs, targets), each a tensor, or a tuple of several; returns a mean loss.
        weight: function (targets) that returns the number over which the loss is a mean; None: examples.
        answer: makes the first argument of ``function`` from the outputs; None: it is a tensor, or a tuple of several.
        warn: function that is called with one line if the loss depends on how a mini-batch is divided.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        weight: Callable[[Any], Any] | None = None,
        answer: Callable[[Tensors], Any] | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._function, self._count, self._answer = function, weight or len_of_first, answer or alone
        self._warn, self._comparisons = warn, COMPARISONS  # comparisons that are still to be made
        self._earlier: MicroBatch | None = None  # the micro-batch before, outputs and targets

    def unwatched(self) -> "LossFunctionTask":
        """Returns the same task without the comparisons, so that a trial does not use up those of the run."""
        same = copy(self)
        same._comparisons = 0
        return same

    def weight(self, targets: Tensors) -> float:
        """Returns the number of examples, or what the function of the weight counts."""
        return float(self._count(alone(targets)))

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """Returns (the function's mean loss times the weight; nothing).

        Raises:
            ConfigurationError: the function does not return one number.
        """
        mean = self._function(self._answer(outputs), alone(targets))
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            shown = f"a tensor of shape {list(mean.shape)}" if isinstance(mean, Tensor) else f"a {type(mean).__name__}"
            raise ConfigurationError(
                f"task._target_: the loss function returned {shown}: it must return one number, the mean over the "
                "examples of a micro-batch, as a tensor"
            )
        if self._comparisons:
            self._warn_of_other_means((tuple(tensor.detach() for tensor in outputs), targets))
        total = widened(mean.reshape(())) * self._count(alone(targets))
        return total, torch.zeros(0, dtype=torch.float64, device=mean.device)

    def _warn_of_other_means(self, micro_batch: MicroBatch) -> None:
        """Warns if the loss of some examples is not the weighted mean of the losses of their parts.

        Then losses and gradients would depend on M. The parts are the micro-batch's halves. A micro-batch of one
        example is one part, and the micro-batch before it the other.

        Args:
            micro_batch: outputs and targets.
        """
        earlier, self._earlier = self._earlier, micro_batch
        if len({tensor.shape[:1] for side in micro_batch for tensor in side}) > 1:  # not of examples alone
            return
        parts = _halves(micro_batch) if len(micro_batch[1][0]) > 1 else earlier and (earlier, micro_batch)
        if parts is None or all(map(torch.equal, parts[0][1], parts[1][1])):  # equal targets tell nothing
            return
        self._comparisons -= 1
        found = wanted = 0.0
        with suppress(Exception):  # the loss takes no parts, or such parts cannot be joined
            found, wanted = self._together_and_apart(parts)
        tolerance = ROUNDING if micro_batch[0][0].dtype.itemsize > 2 else HALF_ROUNDING
        if abs(found - wanted) > tolerance * abs(found):
            self._comparisons = 0
            self._warn(DEPENDS_ON_M.format(sum(len(targets[0]) for _, targets in parts), found, wanted))
        if not self._comparisons:
            self._earlier = None

    @torch.no_grad()
    def _together_and_apart(self, parts: tuple[MicroBatch, MicroBatch]) -> tuple[float, float]:
        """Returns the loss of two parts joined, and the weighted mean of their losses.

        If the loss is random, so that the parts joined have two losses, the first of these is returned twice. Copies of
        the function compute all losses, because it may keep what it has seen.
        """
        whole = _joined(*parts)
        computed = [
            float(deepcopy(self._function)(self._answer(outputs), alone(targets)))
            for outputs, targets in (whole, whole, *parts)
        ]
        joined, again, *means = computed
        counts = [self.weight(targets) for _, targets in parts]
        apart = sum(mean * count for mean, count in zip(means, counts, strict=True) if count) / sum(counts)
        return joined, apart if joined == again else joined


def alone(tensors: Tensors) -> Any:
    """Returns one tensor by itself, several as they are."""
    return tensors[0] if len(tensors) == 1 else tensors


def len_of_first(targets: Any) -> int:
    """Returns the number of examples."""
    return len(targets if isinstance(targets, Tensor) else targets[0])


def _halves(micro_batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """Returns the first and the second half of a micro-batch's examples."""
    outputs, targets = [[tensor.tensor_split(2) for tensor in side] for side in micro_batch]
    first, second = [(tuple(o[n] for o in outputs), tuple(t[n] for t in targets)) for n in range(2)]
    return first, second


def _joined(first: MicroBatch, second: MicroBatch) -> MicroBatch:
    """Returns the examples of both micro-batches as one."""
    outputs, targets = [tuple(map(torch.cat, zip(*sides, strict=True))) for sides in zip(first, second, strict=True)]
    return outputs, targets
