"""Tests the moving average of weights and BatchNorm statistics: its numbers, and what a run does with it."""

from pathlib import Path

import pytest
import torch
from checkpoint_tools import saved
from inline_run import train_inline
from run_files import losses, rows
from safetensors.torch import load_file
from small_models import CPU
from torch import nn

from gpipe_cli.commands import export
from gpipe_cli.optim.average import WeightAverage
from gpipe_cli.pipeline.cell import BuiltLayer, Cell
from gpipe_cli.pipeline.randomness import NoiseSource


def test_average_follows_the_weights_by_tensorflows_ramp() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    average = WeightAverage([Cell(0, [BuiltLayer(0, "layer", module)], NoiseSource(1, 0, CPU))], 0.25)
    found = []
    for t, weight in enumerate((2.0, 3.0, 11.0)):
        module.weight.data.fill_(weight)
        average.update(t)
        found.append(average.of("layer")["weight"].item())
    # decay 1/10, 2/11, then 3/12 = 0.25, which is the most: 0.1·1 + 0.9·2, 2/11·1.9 + 9/11·3, 0.25·2.8 + 0.75·11
    assert found == pytest.approx([1.9, 2.8, 8.95], rel=1e-14)


# -- in a run --------------------------------------------------------------------------------------------------------

TINY = ["debug=tiny", "model=amoebanet", "model.L=3", "trainer.average=0.9", "trainer.steps=4", "checkpoint.every=1"]
TINY += ["lr_schedule=constant", "trainer.evaluate_first=false"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("average") / "run"
    train_inline(run_dir, *TINY, "pipeline.K=1", "checkpoint.keep=9")
    return run_dir


def test_checkpoints_hold_the_averages_of_weights_and_statistics(whole: Path) -> None:
    second, third = saved(whole, 2), saved(whole, 3)
    names = [name for name in third if "/average:" in name]
    assert any("running_var" in name for name in names) and not any("num_batches_tracked" in name for name in names)
    for name in names:
        live = third.get(name.replace("average:", "weight:"), third.get(name.replace("average:", "buffer:")))
        expected = second[name].double() * 3 / 12 + live.double() * 9 / 12  # decay (1 + 2) / (10 + 2) in the third step
        assert torch.allclose(third[name].double(), expected, rtol=1e-5, atol=1e-6), name


def test_evaluation_uses_the_averages(whole: Path, tmp_path: Path) -> None:
    train_inline(tmp_path, *TINY, "trainer.average=null", "trainer.steps=2", "checkpoint.every=null")
    assert losses(tmp_path) == losses(whole)[:2]
    plain, averaged = (rows(run / "evaluations.jsonl")[0] for run in (tmp_path, whole))
    assert plain["step"] == averaged["step"] == 2 and plain["nll"] != averaged["nll"]


def test_export_writes_the_averages_when_asked(whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    assert export.main([f"checkpoint={whole}", f"output={output}", "average=true"]) == 0
    exported, tensors = load_file(output), saved(whole, 4)
    assert torch.equal(exported["head.classifier.weight"], tensors["head/average:classifier.weight"])
    held = [name.replace("/buffer:", "/weight:") for name in tensors]
    assert exported.keys() == {name.replace("/weight:", ".") for name in held if "/weight:" in name}
