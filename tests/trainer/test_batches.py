"""Tests that a data source whose mini-batches have another number of micro-batches than M is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpipe_cli.data.source import Batch, Source
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.trainer.batches import evaluation_batches, first_batch, training_batches

MICRO_BATCH = ((torch.zeros(1),), (torch.zeros(1),))


class Given(Source):
    """Yields mini-batches with these numbers of micro-batches."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        return (Batch([MICRO_BATCH] * count, number) for number, count in enumerate(self.counts, start=1))

    def evaluation(self, M: int) -> Iterator[Batch]:
        return self.train(None, M, 0, 1)


def positions(batches: Iterator[Batch]) -> list[Any]:
    return [batch.position for batch in batches]


def test_mini_batches_with_the_micro_batches_that_were_asked_for_pass() -> None:
    assert positions(training_batches(Given(2, 2, 2), None, 2, 0, 1)) == [1, 2, 3]
    assert first_batch(Given(2, 2), 2, 1).position == 1


@pytest.mark.parametrize("counts", [(3,), (2, 3), (2, 1), (2, 0)])
def test_another_number_of_micro_batches_to_train_on_is_refused_with_the_source_s_name(counts: tuple[int, ...]) -> None:
    said = (
        rf"data source test_batches\.Given gave {counts[-1]} micro-batches in a mini-batch, 2 were asked for: .*train\("
    )
    with pytest.raises(ConfigurationError, match=said):
        positions(training_batches(Given(*counts), None, 2, 0, 1))


def test_an_evaluation_s_batches_may_have_fewer_micro_batches_but_not_more() -> None:
    assert positions(evaluation_batches(Given(2, 2, 1), 2, 0, 1)) == [1, 2, 3]
    assert positions(evaluation_batches(Given(2, 2, 1), 2, replica=1, replicas=2)) == [2]
    with pytest.raises(ConfigurationError, match=r"gave 3 micro-batches in a mini-batch, 2 were asked for: .*at most"):
        positions(evaluation_batches(Given(2, 3), 2, 0, 1))


def test_a_source_without_any_mini_batch_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"data source test_batches\.Given gave no mini-batch"):
        first_batch(Given(), 2, 1)
