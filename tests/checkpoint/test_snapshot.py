"""Tests that checkpoints restore every bit at any partition, and refuse by name whatever does not fit the model."""

import os
from pathlib import Path

import checkpoint_tools as tools
import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.checkpoint.files import CheckpointError, RunState, latest
from gpipe_cli.checkpoint.layer_state import layer_state, load_layer, restore_layer
from gpipe_cli.checkpoint.writer import CheckpointWriter
from gpipe_cli.commands import export


@pytest.mark.parametrize("name", tools.OPTIMIZERS)
def test_a_resumed_training_equals_the_uninterrupted_one_bit_for_bit(name: str, tmp_path: Path) -> None:
    layers = tools.make_layers()
    optimizer = tools.OPTIMIZERS[name](tools.parameters_of(layers))
    tools.train(layers, optimizer, range(3))
    info = tools.save(tmp_path, 3, layers, optimizer)
    saved = tools.snapshot(layers, optimizer)
    tools.train(layers, optimizer, range(3, 6))

    resumed = tools.make_layers(seed=1)
    resumed_optimizer = tools.OPTIMIZERS[name](tools.parameters_of(resumed))
    tools.restore(info, resumed, resumed_optimizer)
    assert tools.snapshot(resumed, resumed_optimizer) == saved
    tools.train(resumed, resumed_optimizer, range(3, 6))
    assert tools.snapshot(resumed, resumed_optimizer) == tools.snapshot(layers, optimizer)


def test_dtypes_empty_tensors_and_numbers_keep_their_bits(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    layer.register_buffer("nothing", torch.zeros(0, 5, dtype=torch.int64))
    layer.register_buffer("scratch", torch.ones(2), persistent=False)
    layer.weight.data[0, 0] = float("nan")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    kept = {"a": torch.tensor(7.0), "n": 3, "f": 0.1, "flag": True, "none": None, "eight": torch.ones(2).bool()}
    optimizer.state[layer.weight] = dict(kept)
    info = tools.save(tmp_path, 1, {"layer": layer}, optimizer)

    state = load_layer(info, "layer")
    assert tools.bits(state.weights["weight"]) == tools.bits(layer.weight)
    assert list(state.buffers) == ["nothing"] and state.buffers["nothing"].shape == (0, 5)
    back = state.optimizer["weight"]
    assert {key: (type(value), value) for key, value in back.items() if not isinstance(value, Tensor)} == {
        key: (type(value), value) for key, value in kept.items() if not isinstance(value, Tensor)
    }
    assert all(tools.bits(back[key]) == tools.bits(value) for key, value in kept.items() if isinstance(value, Tensor))  # type: ignore[arg-type]


def test_the_snapshot_is_of_the_moment_of_begin(tmp_path: Path) -> None:
    layers = tools.make_layers()
    writer = CheckpointWriter(tmp_path, 0, [*layers])
    before = tools.bits(layers["embed"].weight)  # type: ignore[arg-type]
    writer.begin(1, {name: layer_state(layer, None) for name, layer in layers.items()})
    with torch.no_grad():
        layers["embed"].weight.zero_()  # type: ignore[operator]
    writer.wait()
    assert tools.bits(load_layer(writer.commit(1, RunState(), 1), "embed").weights["weight"]) == before


def test_layer_names_that_are_no_file_names_are_saved_inside_the_checkpoint(tmp_path: Path) -> None:
    layers: tools.Layers = {name: nn.Linear(1, 1) for name in ("../../outside", "a/b", "encoder.0", "größe %")}
    info = tools.save(tmp_path, 1, layers)
    assert {info.layer_path(name).resolve().parent for name in layers} == {info.path.resolve() / "layers"}
    tools.restore(info, layers, None)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Linear(4, 7), r"parameter weight should be float32\[7, 4\], the checkpoint has float32\[6, 4\]"),
        (nn.Linear(4, 6, bias=False), "parameter bias is in the checkpoint, not in the model"),
        (nn.Linear(4, 6).double(), r"weight should be float64\[6, 4\], the checkpoint has float32"),
    ],
    ids=["shape", "extra", "dtype"],
)
def test_a_layer_that_differs_is_refused_by_name_and_left_alone(other: nn.Module, message: str, tmp_path: Path) -> None:
    info = tools.save(tmp_path, 1, tools.make_layers())
    before = {key: tensor.clone() for key, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        restore_layer("embed", other, None, load_layer(info, "embed"))
    assert "layer embed" in str(caught.value)
    assert all(torch.equal(before[key], tensor) for key, tensor in other.state_dict().items())


def test_an_optimizer_whose_state_cannot_be_stored_is_named() -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(layer.parameters())
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step(lambda: 0.0)  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError, match=r"LBFGS keeps '.*' of parameter weight as list"):
        layer_state(layer, optimizer)


def test_a_checkpoint_that_is_not_the_whole_model_is_never_complete(tmp_path: Path) -> None:
    layers = tools.make_layers()
    states = {name: layer_state(layer, None) for name, layer in layers.items() if name != "head"}
    writer = CheckpointWriter(tmp_path, 0, [*layers])
    writer.begin(1, states)
    writer.wait()
    with pytest.raises(CheckpointError, match=r"not in both: head$"):
        writer.commit(1, RunState(), 1)
    assert latest(tmp_path)[0] is None


def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        info = tools.save(tmp_path, 1, tools.make_layers())
        assert export.main([str(tmp_path)]) == 0
    finally:
        os.umask(before)
    files = [*map(info.layer_path, info.layers), info.path / "manifest.json", tmp_path / "model.safetensors"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}
