"""Tests that an earlier release's run (tests/old_checkpoint/) is evaluated, exported and gone on from.

All by the commands; the keys of the run are those in its .hydra/overrides.yaml. The last bits belong to the processor
and the releases that expected.json names. With others a tolerance serves; so small a model's gradients need a wide one.
"""

import json
import shutil
from math import isclose
from pathlib import Path
from typing import Any

import golden_losses
import pytest
import yaml
from safetensors.torch import load_file

from gpipe_cli.commands import eval as evaluate
from gpipe_cli.commands import export, train

HOME = Path(__file__).parent / "old_checkpoint"
EXPECTED = json.loads((HOME / "expected.json").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HOME / "run", tmp_path / "run"))


def test_it_is_evaluated(run: Path) -> None:
    assert evaluate.main([f"checkpoint={run}", f"output={run / 'report'}", "launch.inline=true"]) == 0
    hold("evaluation", EXPECTED["evaluation"], json.loads((run / "report" / "evaluation.json").read_text())["numbers"])


@pytest.mark.parametrize("cells", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_gone_on_from(run: Path, cells: int) -> None:
    before = (run / "metrics.jsonl").read_text()
    keys = yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text())
    steps = EXPECTED["next_steps"]
    others = [f"checkpoint.resume={run}", f"trainer.steps={steps[-1]['step']}", "model.positions=sinusoids"]
    assert train.main([*keys, *others, f"pipeline.K={cells}", "launch.inline=true", f"hydra.run.dir={run}"]) == 0
    after = (run / "metrics.jsonl").read_text()
    assert after.startswith(before)
    lines = [json.loads(line) for line in after.removeprefix(before).splitlines()]
    assert [line["step"] for line in lines] == [step["step"] for step in steps]
    for expected, line in zip(steps, lines, strict=True):
        hold(f"step {line['step']}", expected, line)


def test_its_weights_are_exported(run: Path, tmp_path: Path) -> None:
    assert export.main([f"checkpoint={run}", f"output={tmp_path / 'model.safetensors'}"]) == 0
    weights = load_file(tmp_path / "model.safetensors")
    assert {name: list(weight.shape) for name, weight in weights.items()} == EXPECTED["state_dict"]


def hold(what: str, expected: dict[str, float], got: dict[str, Any]) -> None:
    tolerance = 0.0 if EXPECTED["made_with"] == golden_losses.made_with() else 1e-3
    for key, value in expected.items():
        assert isclose(value, got[key], rel_tol=tolerance), f"{key} of {what}: {value!r} recorded, {got[key]!r} now"
