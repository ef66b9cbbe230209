"""What the model's outputs are for: the interface between the trainer and `task._target_`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ..micro_batch import Tensors
from .generation import GenerationSettings

if TYPE_CHECKING:
    from torch import Tensor


class Task(Protocol):
    """Loss and metrics of micro-batches. Everything is a sum, so that any split of a mini-batch gives the same.

    Nothing has to be inherited. `outputs` are those of the last layer, as a tuple also where it is one tensor, and
    `targets` are the data source's; `weight` sees the targets on the CPU, the others see both on the device.

    Attributes:
        statistics: names of the sums that `loss` also returns, in pairs (part, whole) whose quotient is logged under
            the name of the part, such as ("accuracy", "examples"); may be empty.
        metrics: names of the sums that `evaluate` returns.
        unit: what a weight of 1 is: "examples" or "tokens".
    """

    @property
    def statistics(self) -> tuple[str, ...]: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    @property
    def unit(self) -> str: ...

    def weight(self, targets: Tensors) -> float:
        """What the micro-batch weighs: its examples, or its non-padding tokens."""

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """For training: (sum of the loss, a scalar; `statistics`, float64 and without gradient)."""

    def evaluate(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """The micro-batch's `metrics`: float64, on the device."""

    def summarize(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """What is reported of an evaluation; the first entry is the loss by which the best checkpoint is chosen.

        Args:
            sums: of `metrics`, over the evaluation set.
            weight: of the evaluation set; positive.
        """


class GeneratingTask(Task, Protocol):
    """A task whose model also writes text, token by token.

    Attributes:
        generation: how much an evaluation generates; None: nothing.
    """

    @property
    def generation(self) -> GenerationSettings | None: ...

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Of the next token: logits [b, t, V], of which the last position counts, to float32 [b, V]; −∞ for never."""

    def score(
        self, hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        """What is reported of generated sentences; with `groups`, a name for each, also for every group."""
