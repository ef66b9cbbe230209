"""Tests ``gpipe-export``, which writes one plain state_dict that the plain layers load."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_tools import OPTIMIZERS, make_layers, parameters_of, save, snapshot, train
from safetensors.torch import load_file
from small_disk import small_disk
from torch import nn

from gpipe_cli.commands import export


def test_an_exported_model_loads_into_the_plain_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {name.replace("/", "_"): layer for name, layer in make_layers().items()}
    optimizer = OPTIMIZERS["Adam"](parameters_of(layers))
    train(layers, [optimizer], range(2))
    save(tmp_path / "run", 2, layers, optimizer)
    path = tmp_path / "model.safetensors"
    assert export.main([f"checkpoint={tmp_path / 'run'}", f"output={path}"]) == 0
    assert "10 tensors of 4 layers" in capsys.readouterr().out
    plain = nn.ModuleDict({name.replace("/", "_"): layer for name, layer in make_layers(seed=1).items()})
    plain.load_state_dict(load_file(path))
    assert snapshot(dict(plain.items()), []) == snapshot(layers, [])


def test_a_run_alone_is_exported_into_its_directory(tmp_path: Path) -> None:
    save(tmp_path, 1, make_layers())
    assert export.main([str(tmp_path)]) == 0
    assert len(load_file(tmp_path / "model.safetensors")) == 10


def test_export_takes_the_step_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = make_layers()
    save(tmp_path, 1, layers, best=1)
    save(tmp_path, 2, layers, best=1)
    for step, wanted in (("best", 1), ("last", 2), ("1", 1)):
        target = tmp_path / f"{step}.safetensors"
        assert export.main([f"checkpoint={tmp_path}", f"output={target}", f"step={step}"]) == 0
        assert f"from step {wanted} of" in capsys.readouterr().out
    assert export.main([f"checkpoint={tmp_path}", f"output={tmp_path / 'x.safetensors'}", "step=7"]) == 2
    assert "it has kept: 1, 2" in capsys.readouterr().err


def test_an_existing_output_is_replaced_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, make_layers())
    output = tmp_path / "model.safetensors"
    output.write_text("mine")
    words = [f"checkpoint={tmp_path}", f"output={output}"]
    assert export.main(words) == 2
    assert "overwrite=true" in capsys.readouterr().err and output.read_text() == "mine"
    assert export.main([*words, "overwrite=true"]) == 0


@pytest.mark.parametrize(
    ("options", "reason"), [("size=16k", "No space left on device"), ("ro", "Read-only file system")]
)
def test_a_disk_that_does_not_take_the_file_is_told_in_one_line(
    options: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", 1, {"wide": nn.Linear(100, 100)})
    with small_disk(tmp_path / "disk", options) as disk:
        assert export.main([str(tmp_path / "run"), f"output={disk / 'model.safetensors'}"]) == 1
        assert not list(disk.iterdir())
    (line,) = capsys.readouterr().err.splitlines()
    assert f"model.safetensors cannot be written: {reason} (room left: " in line
