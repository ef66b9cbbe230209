"""Tests what a run asks of its data and weights before it trains, and pipelines that the planner chooses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from inline_run import train_inline
from own_plan import ON_CPU, planned
from run_files import losses

from gpipe_cli.commands import train, verify
from gpipe_cli.commands.plan import make_request
from gpipe_cli.data.source import Batch, Source
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.trainer.assembly import usual_micro_batch
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


def test_mini_batches_with_another_number_of_micro_batches_are_refused_with_the_source_s_name() -> None:
    assert positions(training_batches(Given(2, 2, 2), None, 2, 0, 1)) == [1, 2, 3]
    said = r"data source test_start\.Given gave 1 micro-batches in a mini-batch, 2 were asked for: .*train\("
    with pytest.raises(ConfigurationError, match=said):
        positions(training_batches(Given(2, 1), None, 2, 0, 1))


def test_an_evaluation_s_batches_may_have_fewer_micro_batches_but_not_more() -> None:
    assert positions(evaluation_batches(Given(2, 2, 1), 2, 0, 1)) == [1, 2, 3]
    assert positions(evaluation_batches(Given(2, 2, 1), 2, replica=1, replicas=2)) == [2]
    with pytest.raises(ConfigurationError, match=r"gave 3 micro-batches in a mini-batch, 2 were asked for: .*at most"):
        positions(evaluation_batches(Given(2, 3), 2, 0, 1))


def test_a_source_without_any_mini_batch_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"data source test_start\.Given gave no mini-batch"):
        first_batch(Given(), 2, 1)


FIRST: MicroBatch = (torch.zeros(38, 16, dtype=torch.int64),), (torch.zeros(38, 8, dtype=torch.int64),)


class Sentences(Given):
    def typical_micro_batch(self, micro_batches: int, longest: bool) -> tuple[MicroBatch, int]:
        shapes = [torch.empty(96 // micro_batches, length, dtype=torch.int64, device="meta") for length in (24, 16)]
        return ((shapes[0],), (shapes[1],)), 96


def test_the_cut_is_made_for_the_usual_lengths_of_sentences_whatever_those_of_the_first() -> None:
    pipeline = make_request(["pipeline.M=4"]).settings.pipeline
    (inputs,), (targets,) = usual_micro_batch(Sentences(), FIRST, pipeline)
    assert (inputs.shape, targets.shape) == ((24, 24), (24, 16))
    assert inputs.device.type == "cpu"


def test_a_source_that_knows_no_usual_lengths_reads_nothing_for_the_cut() -> None:
    assert usual_micro_batch(Given(), FIRST, make_request([]).settings.pipeline) is FIRST


# -- pipeline=auto ---------------------------------------------------------------------------------------------------


TINY = ("debug=tiny", "model=transformer_lm_small", "model.L=2", "checkpoint.every=2")


def test_a_run_trains_with_what_was_chosen_as_with_the_same_keys_typed(tmp_path: Path) -> None:
    words = (*TINY, "pipeline=auto", "pipeline.M=auto")
    _, events = train_inline(tmp_path / "auto", *words)
    (chosen,) = (event["keys"] for event in events if event["kind"] == "chosen")
    assert {*chosen} >= {"pipeline.K", "pipeline.M", "pipeline.schedule", "pipeline.partition", "pipeline.workers"}
    typed = [f"{key}={str(value).replace(' ', '')}" for key, value in chosen.items()]
    _, again = train_inline(tmp_path / "typed", *TINY, *typed)
    assert losses(tmp_path / "typed") == losses(tmp_path / "auto") != []
    assert not any(event["kind"] == "chosen" for event in again)


def test_what_was_chosen_is_recorded_and_a_resume_keeps_what_results_depend_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*TINY, "lr_schedule=constant", "pipeline=auto", "pipeline.M=auto", "pipeline.replicas=auto"]
    words.append(f"hydra.run.dir={run}")
    assert train.main([*words, "trainer.steps=2"]) == 0
    chosen = yaml.safe_load((run / ".hydra" / "chosen.yaml").read_text())
    assert train.main([*words, "trainer.steps=4", "checkpoint.resume=auto"]) == 0
    later = yaml.safe_load((run / ".hydra" / "chosen.yaml").read_text())
    assert not {"pipeline.M", "pipeline.replicas", "pipeline.schedule"} & {*later}
    assert later["pipeline.workers"] == chosen["pipeline.workers"]


def test_other_commands_do_not_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([*TINY, "pipeline.K=auto", f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert "pipeline.K=auto: gpipe-train and gpipe-plan choose these, type values here" in capsys.readouterr().err


def test_graphs_are_kept_by_the_memory_and_change_no_loss(tmp_path: Path) -> None:
    words = (*TINY, "pipeline.K=4", "pipeline.M=4", "pipeline.workers=1")
    most, least = (planned(*words, f"pipeline.remat={remat}", ON_CPU).memory for remat in ("never", "always"))
    _, events = train_inline(tmp_path / "auto", *words, "pipeline.remat=auto", f"pipeline.memory={(most + least) // 2}")
    (chosen,) = (event["keys"] for event in events if event["kind"] == "chosen")
    assert sorted(chosen) == ["pipeline.keep", "pipeline.partition"] and 0 < min(chosen["pipeline.keep"]) < 4
    train_inline(tmp_path / "always", *words, "pipeline.remat=always")
    assert losses(tmp_path / "always") == losses(tmp_path / "auto") != []
