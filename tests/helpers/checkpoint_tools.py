"""Defines what the checkpoint tests share: a small model, training steps, saving as the only worker, comparing bits."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from gpipe_cli.checkpoint.files import CheckpointInfo, RunState, read_manifest, step_directory
from gpipe_cli.checkpoint.layer_state import layer_state, load_layer, restore_layer
from gpipe_cli.checkpoint.writer import CheckpointWriter

Layers = dict[str, nn.Module]

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def make_layers(seed: int = 0) -> Layers:
    torch.manual_seed(seed)
    return {
        "embed": nn.Linear(4, 6),
        "block/1": nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
        "relu": nn.ReLU(),
        "head": nn.Linear(6, 3, bias=False),
    }


def parameters_of(layers: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    return [parameter for layer in layers.values() for parameter in layer.parameters()]


def train(layers: Layers, optimizer: Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        hidden = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for layer in layers.values():
            hidden = layer(hidden)
        hidden.square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def save(
    run_dir: Path, step: int, layers: Layers, optimizer: Optimizer | None = None, keep: int = 2, best: int | None = None
) -> CheckpointInfo:
    """Saves everything as the only worker; ``best``: the step with the best evaluation so far."""
    run_dir.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(run_dir, 0, [*layers], keep)
    writer.begin(step, {name: layer_state(layer, optimizer) for name, layer in layers.items()})
    writer.wait()
    info = writer.commit(step, RunState(data_position={"epoch": step}, scalars={"best_step": best}), workers=1)
    writer.wait()
    return info


def restore(info: CheckpointInfo, layers: Layers, optimizer: Optimizer | None) -> None:
    for name, layer in layers.items():
        restore_layer(name, layer, optimizer, load_layer(info, name))


def saved(run_dir: Path, step: int) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint, by layer and name."""
    info = read_manifest(step_directory(run_dir, step))
    return {f"{layer}/{name}": t for layer in info.layers for name, t in load_file(info.layer_path(layer)).items()}


def changed(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of tensors with other bits."""
    assert one.keys() == other.keys()
    return [name for name in one if bits(one[name]) != bits(other[name])]


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def snapshot(layers: Layers, optimizer: Optimizer) -> dict[str, object]:
    """Returns everything that must be restored bit for bit, by name."""
    found: dict[str, object] = {}
    for name, layer in layers.items():
        found.update({f"{name}.{key}": bits(tensor) for key, tensor in layer.state_dict().items()})
        for key, parameter in layer.named_parameters():
            for entry, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}:{entry}"] = bits(value) if isinstance(value, Tensor) else value
    return found
