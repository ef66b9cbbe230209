"""Tests of runs on a device that is not the CPU: one without hardware (tests/helpers/other_device.py), and a GPU."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from inline_run import train_inline
from other_device import NAME, WAITS, runs_on
from own_model import WORDS
from processes import command, succeeded
from run_files import losses, rows

from gpipe_cli.checkpoint.files import read_manifest, step_directory
from gpipe_cli.partition.tracking import Tracker
from gpipe_cli.trainer.batches import TrainingBatches

SMALL = (*WORDS, "trainer.steps=4", "checkpoint.every=2", "optimizer.lr=0.01")


TIED = ("model._target_=own_model.with_ties", "trainer.average=0.9", "trainer.evaluate_every=2")


@pytest.mark.parametrize("words", [pytest.param((), marks=pytest.mark.slow), TIED], ids=["plain", "tied and averaged"])
def test_a_run_on_the_device_has_the_bits_of_any_k(words: tuple[str, ...], tmp_path: Path) -> None:
    small = (*SMALL, "trainer.steps=2")
    for K in (1, 2, 4):
        with runs_on(NAME):
            train_inline(tmp_path / str(K), *small, *words, f"pipeline.K={K}")
    assert losses(tmp_path / "1") == losses(tmp_path / "2") == losses(tmp_path / "4")
    train_inline(tmp_path / "cpu", *small, *words)
    assert losses(tmp_path / "1") == losses(tmp_path / "cpu")
    if words == TIED:
        here, there = (rows(tmp_path / run / "evaluations.jsonl") for run in ("4", "cpu"))
        assert [row["nll"] for row in here] == [row["nll"] for row in there]


def parts_on(device: str, folder: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """Yields run directory, device and words of a run on the CPU, and of the parts of one that goes on elsewhere."""
    yield folder / "cpu", "cpu", ["trainer.steps=4"]
    run = folder / "mixed"
    for steps, where in ((2, device), (3, "cpu"), (4, device)):
        resume = f"checkpoint.resume={step_directory(run, steps - 1) if steps > 2 else 'null'}"
        yield run, where, [f"trainer.steps={steps}", "checkpoint.every=1", resume]
        assert len(losses(run)) == steps


@pytest.mark.slow
def test_a_run_goes_on_from_one_kind_of_device_on_another(tmp_path: Path) -> None:
    for run, where, words in parts_on(NAME, tmp_path):
        with runs_on(where):
            train_inline(run, *SMALL, *words)
        assert read_manifest(step_directory(run, len(losses(run)))).versions["device"] == where
    assert losses(tmp_path / "mixed") == losses(tmp_path / "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_goes_on_from_a_gpu_on_a_cpu(tmp_path: Path) -> None:
    """Runs processes of its own: where torch knows of another device besides, its backward on a GPU fails."""
    for run, where, words in parts_on("cuda", tmp_path):
        succeeded(command("train", *SMALL, *words, f"hydra.run.dir={run}", f"pipeline.device={where}"))
    assert losses(tmp_path / "mixed") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-4)


def waits_of_steps(folder: Path, steps: int, *words: str) -> Counter[str]:
    with runs_on(NAME), WAITS.listed() as waits:
        train_inline(folder / str(steps), *SMALL, "checkpoint.every=null", f"trainer.steps={steps}", *words)
    return Counter(waits)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_the_host_waits_once_a_step_and_once_an_evaluation(optimizer: str, tmp_path: Path) -> None:
    words = ("pipeline.M=8", "trainer.gradient_clip=0.5", "pipeline.schedule=1f1b", f"optimizer={optimizer}")
    offer, waits = TrainingBatches.offer, list[int]()

    def noting(batches: TrainingBatches) -> None:
        waits.append(WAITS.number)
        offer(batches)

    with patch.object(TrainingBatches, "offer", noting):
        three, two = (waits_of_steps(tmp_path, steps, *words) for steps in (3, 2))
    # One step more: losses, the task's statistics and the gradients' norms, in one copy.
    assert three - two == {"aten::_to_copy in distributed/step_message.py:write_result": 1}
    evaluating = {wait: n for wait, n in two.items() if "evaluator" in wait}
    assert evaluating == {"aten::_to_copy in trainer/evaluator.py:_score": 1}
    assert waits[1] == waits[0]  # the next mini-batch is read before the host waits for the step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "most"),
    [
        ("model=transformer optimizer=adam pipeline.K=13 task.generation=null", 2_450),
        ("model=amoebanet pipeline.K=4", 11_300),
    ],
)
def test_a_step_has_few_operations(model: str, most: int, tmp_path: Path) -> None:
    """Views are not counted. A device's host must start each of them."""
    words = (*model.split(), "debug=tiny", "trainer.steps=3", "trainer.evaluate_first=false")
    words += ("trainer.evaluate_every=null", "checkpoint.every=null")
    counted: list[tuple[str, int]] = []
    with Tracker() as tracker:
        train_inline(tmp_path, *words, on_event=lambda event: counted.append((event["kind"], len(tracker.operations))))
    _, second, third = (operations for kind, operations in counted if kind == "progress")
    assert third - second <= most
