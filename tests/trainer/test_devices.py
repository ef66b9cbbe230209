"""Tests of runs on a device that is not the CPU: one without hardware (tests/jobs/late_device.py), and a GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from inline_run import train_inline
from late_device import LATE, METER, NAME, LateTensor
from own_model import WORDS
from torch import Tensor, nn

from gpipe_cli.bench.steps import engine_step, make_cell
from gpipe_cli.checkpoint.files import read_manifest, step_directory
from gpipe_cli.pipeline.cell import LayerFailed

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
SMALL = (*WORDS, "trainer.steps=4", "checkpoint.every=2", "optimizer.lr=0.01")


@contextmanager
def device_of_runs(name: str) -> Iterator[None]:
    """Makes `name` the device of the runs inside the block, as pipeline.device=auto finds a GPU."""
    device = LATE if name == NAME else torch.device(name, 0 if name == "cuda" else None)
    world = "gpipe_cli.distributed.world"
    with patch(f"{world}.choose_device", lambda *_: device), patch(f"{world}.device_identity", lambda _: name):
        yield


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_tensors_of_two_devices_do_not_mix_and_bytes_are_counted() -> None:
    before = METER.now
    x = torch.ones(4, 5).to(LATE)
    assert type(x) is LateTensor and METER.now == before + 80
    with pytest.raises(RuntimeError, match=r"one device, but found late:0 and cpu"):
        x + torch.ones(5)
    assert (x * 2).sum().item() == 40
    del x
    assert METER.now == before


def test_a_layer_that_makes_a_tensor_on_the_cpu_is_named() -> None:
    class Forgetful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(3)

    batch = [((torch.zeros(2, 3),), (torch.zeros(2, 3),))]
    step = engine_step(
        [make_cell(0, [nn.Linear(3, 3).to(LATE), Forgetful()], 0, LATE)], (0,), 0, None, batch, device=LATE
    )
    with pytest.raises(LayerFailed, match=r"layer 'layer\.1'") as failed:
        step()
    assert "one device" in str(failed.value.__cause__)


@pytest.mark.slow
@pytest.mark.parametrize("device", [NAME, CUDA])
def test_a_run_goes_on_from_one_kind_of_device_on_another(device: str, tmp_path: Path) -> None:
    train_inline(tmp_path / "cpu", *SMALL)
    with device_of_runs(device):
        train_inline(tmp_path / "there", *SMALL)
    mixed, warned = tmp_path / "mixed", list[str]()
    for steps, where in ((2, device), (3, "cpu"), (4, device)):
        with device_of_runs(where):
            resume = f"checkpoint.resume={step_directory(mixed, steps - 1) if steps > 2 else 'null'}"
            _, events = train_inline(mixed, *SMALL, f"trainer.steps={steps}", "checkpoint.every=1", resume)
        assert read_manifest(step_directory(mixed, steps)).versions["device"] == where
        warned += [event["text"] for event in events if event["kind"] == "warning"]
    assert losses(mixed) == pytest.approx(losses(tmp_path / "cpu"), rel=0 if device == NAME else 1e-4)
    assert losses(tmp_path / "there") == pytest.approx(losses(tmp_path / "cpu"), rel=0 if device == NAME else 1e-4)
    assert [text.partition(":")[0] for text in warned] == [
        f"the checkpoint was made on {device}, and this run computes on cpu",
        f"the checkpoint was made on cpu, and this run computes on {device}",
    ]


def waits_of_steps(folder: Path, steps: int, *words: str) -> Counter[str]:
    with device_of_runs(NAME), METER.waiting() as waits:
        train_inline(folder / str(steps), *SMALL, "checkpoint.every=null", f"trainer.steps={steps}", *words)
    return Counter(waits)


def test_the_host_waits_at_the_end_of_a_step_only(tmp_path: Path) -> None:
    words = ("pipeline.M=8", "trainer.gradient_clip=0.5", "pipeline.schedule=1f1b")
    more = waits_of_steps(tmp_path, 5, *words) - waits_of_steps(tmp_path, 2, *words)
    # Three steps more: losses and the task's statistics, and the gradients' norms, each read once a step.
    report, norms = "in metrics/step_report.py:write_record", "in pipeline/gradients.py:squared_norms"
    assert {place: sum(n for wait, n in more.items() if wait.endswith(place)) for place in (report, norms)} == {
        report: 2 * 3,
        norms: 3,
    }
    assert all(wait.endswith((report, norms)) for wait in more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("model=transformer", "model.dropout=0.1"),
        ("model=transformer_lm", "pipeline.schedule=zero_bubble", "pipeline.cost=profile"),
    ],
    ids=["transformer", "transformer_lm"],
)
def test_training_evaluation_and_translation_are_those_of_the_cpu(words: tuple[str, ...], tmp_path: Path) -> None:
    found = {}
    for device in (NAME, "cpu"):
        with device_of_runs(device):
            small = ("debug=tiny", "trainer.steps=1", "trainer.evaluate_first=false", "pipeline.workers=1")
            summary, _ = train_inline(tmp_path / device, *small, *words)
        found[device] = {key: value for key, value in summary["evaluation"].items() if "second" not in key}
    # Attention runs as several operations there and as one on a CPU, and Adam's first update magnifies what is rounded.
    assert found[NAME] == pytest.approx(found["cpu"], rel=1e-3)
