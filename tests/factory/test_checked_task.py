"""Tests that a user's task is told which of its methods returns something wrong, and what it must return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.checked_task import CheckedTask
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
    assert CheckedTask(Answers(torch.ones(2), metrics=("nll", "correct")), "mine.Task").evaluate((), ()).tolist() == [
        1,
        1,
    ]


def test_fewer_classes_than_the_data_have_are_named() -> None:
    task = CheckedTask(ClassificationTask(), "ClassificationTask")
    for method in (task.loss, task.evaluate):
        with pytest.raises(ConfigurationError, match=r"outputs of shape \[3, 2\] .* as many classes"):
            method((torch.zeros(3, 2),), (torch.tensor([0, 1, 2]),))


@pytest.mark.parametrize(
    ("answer", "statistics", "said"),
    [
        (NUMBER, (), r"vector of 0 numbers, torch\.zeros\(0\) where there are none, not a tensor of shape \[\]"),
        (
            (torch.ones(6), NONE),
            (),
            r"vector of 0 .* not \(a tensor of shape \[6\], a tensor of shape \[0\]\)",
        ),
        ((NUMBER, torch.ones(1)), ("a", "b"), r"statistics as a vector of 2 numbers, not .*shape \[1\]\)"),
        (None, (), "not nothing"),
        ((2.5, NONE), (), r"not \(a float, a tensor of shape \[0\]\)"),
    ],
)
def test_a_wrong_loss_is_told(answer: Any, statistics: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"task\._target_=mine\.Task: loss\(\) must return .*{said}"):
        CheckedTask(Answers(answer, statistics), "mine.Task").loss((), ())


@pytest.mark.parametrize(
    ("answer", "said"), [(torch.ones(3), r"a tensor of shape \[3\]"), (NUMBER, r"shape \[\]"), (2.5, "a float")]
)
def test_a_wrong_evaluation_is_told(answer: Any, said: str) -> None:
    wanted = r"task\._target_=mine\.Task: evaluate\(\) must return .* metrics \(nll, correct\), not "
    with pytest.raises(ConfigurationError, match=wanted + f".*{said}"):
        CheckedTask(Answers(answer, metrics=("nll", "correct")), "mine.Task").evaluate((), ())
