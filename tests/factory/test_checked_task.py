"""Tests that a user's task is told which of its methods returns something wrong, and what it must return."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.wrappers import CheckedTask
from gpipe_cli.tasks.base import Task
from gpipe_cli.tasks.classification import ClassificationTask

NUMBER, NONE = torch.tensor(2.5), torch.zeros(0)


class Answers(Task):
    """Returns the values it was made with, as a task."""

    predicted = "an attribute of its own"

    def __init__(self, answer: Any, statistics: tuple[str, ...] = (), metrics: tuple[str, ...] = ("nll",)) -> None:
        self.answer, self.statistics, self.metrics = answer, statistics, metrics

    def weight(self, targets: tuple[Tensor, ...]) -> float:
        return 1.0

    def loss(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Any:
        return self.answer

    def evaluate(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Any:
        return self.answer

    def summarize(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        return dict(sums)


def test_right_answers_and_optional_attributes_pass() -> None:
    task = CheckedTask(Answers((NUMBER, torch.ones(2)), ("correct", "examples")), "mine.Task")
    assert task.loss((), ())[0] is NUMBER
    assert task.predicted == "an attribute of its own" and task.generation is None
    judge = CheckedTask(Answers(torch.ones(2), metrics=("nll", "correct")), "mine.Task")
    assert judge.evaluate((), ()).tolist() == [1, 1]


def test_fewer_classes_than_the_data_have_are_named() -> None:
    task = CheckedTask(ClassificationTask(), "ClassificationTask")
    for method in (task.loss, task.evaluate):
        with pytest.raises(ConfigurationError, match=r"outputs of shape \[3, 2\] .* as many classes"):
            method((torch.zeros(3, 2),), (torch.tensor([0, 1, 2]),))


@pytest.mark.parametrize("answer", [NUMBER, (torch.ones(6), NONE), (NUMBER, torch.ones(1)), None, (2.5, NONE)])
def test_a_wrong_loss_is_told(answer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"_target_=mine\.Task: loss\(\) must return .* its 2 statistics"):
        CheckedTask(Answers(answer, ("a", "b")), "mine.Task").loss((), ())


@pytest.mark.parametrize("answer", [torch.ones(3), NUMBER, 2.5])
def test_a_wrong_evaluation_is_told(answer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"mine\.Task: evaluate\(\) must return .* metrics \(nll, correct\)"):
        CheckedTask(Answers(answer, metrics=("nll", "correct")), "mine.Task").evaluate((), ())
