"""Tests by which micro-batch a run times its layers and cuts the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpipe_cli.commands.plan import make_request
from gpipe_cli.data.source import Batch, Source
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.trainer.assembly import usual_micro_batch

FIRST: MicroBatch = (torch.zeros(38, 16, dtype=torch.int64),), (torch.zeros(38, 8, dtype=torch.int64),)


class Unknown(Source):
    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        raise AssertionError("no data are read")

    def evaluation(self, M: int) -> Iterator[Batch]:
        raise AssertionError("no data are read")


class Sentences(Unknown):
    def typical_micro_batch(self, micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
        shapes = [torch.empty(96 // micro_batches, length, dtype=torch.int64, device="meta") for length in (24, 16)]
        return ((shapes[0],), (shapes[1],)), 96


def test_the_cut_is_made_for_the_usual_lengths_of_sentences_whatever_those_of_the_first() -> None:
    pipeline = make_request(["pipeline.M=4"]).settings.pipeline
    (inputs,), (targets,) = usual_micro_batch(Sentences(), FIRST, pipeline)
    assert (inputs.shape, targets.shape) == ((24, 24), (24, 16))
    assert inputs.device.type == "cpu"


def test_a_source_that_knows_no_usual_lengths_reads_nothing_for_the_cut() -> None:
    assert usual_micro_batch(Unknown(), FIRST, make_request([]).settings.pipeline) is FIRST
