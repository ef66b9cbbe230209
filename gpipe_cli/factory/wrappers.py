"""Wraps functions that the configuration names: checks a task's results, gives a model the targets among its inputs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from ..data.source import Batch, Source
from ..errors import ConfigurationError
from ..micro_batch import MicroBatch, Tensors
from ..tasks.base import Task


class CheckedTask:
    """Wraps a task, with all its attributes, so that an error names the task and its method.

    Args:
        task: made from the configuration's section.
        name: its `_target_`.
    """

    def __init__(self, task: Task, name: str) -> None:
        self._task, self._name = task, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        """Returns the task's loss and statistics.

        Raises:
            ConfigurationError: they are not one number and the vector of statistics, or a target has no output.
        """
        answer = self._answer(self._task.loss, outputs, targets)
        count = len(self._task.statistics)
        if isinstance(answer, tuple) and len(answer) == 2:
            loss, statistics = answer
            if isinstance(loss, Tensor) and loss.numel() == 1 and _is_vector(statistics, count):
                return loss, statistics
        raise ConfigurationError(
            f"task._target_={self._name}: loss() must return two tensors, the sum of the micro-batch's losses as one "
            f'number (reduction="sum") and its {count} statistics as a vector (torch.zeros(0) without any)'
        )

    def evaluate(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns the task's metrics of a micro-batch.

        Raises:
            ConfigurationError: they are not a vector with one number for each metric, or a target has no output.
        """
        answer = self._answer(self._task.evaluate, outputs, targets)
        if not _is_vector(answer, len(self._task.metrics)):
            raise ConfigurationError(
                f"task._target_={self._name}: evaluate() must return a vector with one number for each of the task's "
                f"metrics ({', '.join(self._task.metrics)})"
            )
        return cast(Tensor, answer)

    def _answer(self, method: Callable[[Tensors, Tensors], Any], outputs: Tensors, targets: Tensors) -> Any:
        """Calls a method of the task; explains an index that is out of bounds."""
        try:
            return method(outputs, targets)
        except (IndexError, RuntimeError) as error:
            if "out of bounds" not in str(error):
                raise
            shapes = ", ".join(str(list(tensor.shape)) for tensor in outputs)
            raise ConfigurationError(
                f"a target of the data is beyond the model's outputs of shape {shapes} ({error}): give the model "
                "as many classes, or tokens, as the data have (data.classes, data.vocabulary)"
            ) from error


def _is_vector(value: object, count: int) -> bool:
    """Returns whether ``value`` has ``count`` numbers in one dimension; a single number may have none."""
    return isinstance(value, Tensor) and value.numel() == count and value.dim() <= 1


class ChangedSource:
    """Wraps a source, with all its attributes: each of its micro-batches is changed by a function."""

    def __init__(self, source: Source, change: Callable[[MicroBatch], MicroBatch]) -> None:
        self._source, self._change = source, change

    def __getattr__(self, name: str) -> Any:
        """Returns the source's attribute; of a method that gives micro-batches, one that gives changed ones."""
        found = getattr(self._source, name)
        if name in ("train", "evaluation", "evaluation_share"):
            return lambda *arguments: map(self._changed, found(*arguments))
        return self._typical if name == "typical_micro_batch" else found

    def _changed(self, batch: Batch) -> Batch:
        return replace(batch, micro_batches=[*map(self._change, batch.micro_batches)])

    def _typical(self, *arguments: Any) -> tuple[MicroBatch, int]:
        micro_batch, examples = self._source.typical_micro_batch(*arguments)
        return self._change(micro_batch), examples


def with_targets(micro_batch: MicroBatch) -> MicroBatch:
    """Returns the micro-batch with its targets as further inputs."""
    inputs, targets = micro_batch
    return (*inputs, *targets), targets


def widened(micro_batch: MicroBatch) -> MicroBatch:
    """Returns the micro-batch with every floating-point tensor in float64."""
    inputs, targets = (tuple(t.double() if t.is_floating_point() else t for t in side) for side in micro_batch)
    return inputs, targets
