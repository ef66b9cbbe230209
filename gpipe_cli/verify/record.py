"""Records training steps so that two ways to run them can be compared.

What passes through the layers is kept as fingerprints, one for each micro-batch, and numbers as they are. Tensors of
the model's size (weights, gradients, optimizer state) lie in files, one for each layer, which every worker writes for
its own layers and rank 0 reads.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..checkpoint.layer_state import copied
from ..pipeline.cell import BuiltLayer
from ..pipeline.messages.boundary import as_tensors
from ..pipeline.step import StepResult
from ..schedule.instruction import Op
from ..trainer.assembly import Assembly
from ..trainer.loop import Trainer

Place = tuple[int, int]  # (replica, micro-batch)

# What is seen of a step: layers' outputs, in the forward and in recompute.
OUTPUT, AGAIN = "output", "output in recompute"
Fingerprint = list[float]  # a tensor's norm, and its projection: almost any error changes one of them


class Point(NamedTuple):
    """Identifies a fingerprint: replica, micro-batch, layer, and the number of the tensor in the layer."""

    replica: int
    micro_batch: int
    layer: int
    number: int


Sight = tuple[str, Point, Fingerprint]  # what was seen (`OUTPUT` or `AGAIN`), where, and its fingerprint


# -- fingerprints ------------------------------------------------------------------------------------------------------


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Computes a tensor's norm and its projection on a fixed vector, in float64."""
    values = tensor.detach().reshape(-1).double()
    direction = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
    direction.mul_(math.sqrt(2)).mul_(math.pi).cos_()  # without a pattern that data could have
    return [float(torch.linalg.vector_norm(values)), float(values @ direction)]


# -- tensors of the model's size ---------------------------------------------------------------------------------------


class Spill:
    """Keeps tensors in files of a folder that all workers share.

    Tensors belong to a moment, such as "after step 2", and a layer.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, moment: str, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes the tensors of one layer."""
        path = self._path(moment, layer)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: copied(tensor) for name, tensor in tensors.items()}, path)

    def get(self, moment: str, layer: int) -> dict[str, Tensor]:
        """Returns the tensors of one layer; none where nothing was written."""
        path = self._path(moment, layer)
        return load_file(path) if path.exists() else {}

    def drop(self, moment: str) -> None:
        """Deletes the files of a moment, if there are any. An empty name deletes those of all moments."""
        shutil.rmtree(self._folder / moment, ignore_errors=True)

    def _path(self, moment: str, layer: int) -> Path:
        return self._folder / moment / f"{layer}.safetensors"


def named(layer: BuiltLayer) -> dict[str, nn.Parameter]:
    """Returns a layer's parameters by name in the whole model: layer.parameter."""
    return {f"{layer.name}.{name}": parameter for name, parameter in layer.module.named_parameters()}


def named_buffers(layer: BuiltLayer) -> dict[str, Tensor]:
    """Returns a layer's buffers by name in the whole model: layer.buffer."""
    return {f"{layer.name}.{name}": buffer for name, buffer in layer.module.named_buffers()}


# -- the pipelined side ------------------------------------------------------------------------------------------------


class RunWatch:
    """Records steps of this worker, by hooks on its layers and around its updates.

    Args:
        assembly: this worker's.
        trainer: takes the steps.
        spill: files for tensors of the model's size; replica 0 writes them.

    Attributes:
        result: numbers of the last step that all workers know; None before the first.
        seen: fingerprints of the layers' outputs since `take_seen`.
    """

    def __init__(self, assembly: Assembly, trainer: Trainer, spill: Spill) -> None:
        self._replica, self._engine, self._spill = assembly.world.replica, assembly.pipeline.engine, spill
        self._layers = assembly.pipeline.layers
        self._trainer = trainer
        trainer.around_update = self._around_update
        self.result: StepResult | None = None
        self.seen: list[Sight] = []
        for layer in self._layers:
            # Functions, because a copy of the module then calls the same watch.
            layer.module.register_forward_hook(self._after(layer.index))

    def take_seen(self) -> list[Sight]:
        """Returns the fingerprints since the last call."""
        seen, self.seen = self.seen, []
        return seen

    def hold(self, number: int) -> None:
        """Writes weights, buffers and optimizer state of this worker after `number` steps, layer by layer."""
        states = self._trainer.updater.layer_states()
        for layer in self._layers if self._replica == 0 else []:
            self._spill.put(f"held {number}", layer.index, held_by(layer, states[layer.name].optimizer))

    def _after(self, layer: int) -> Callable[[nn.Module, Any, object], None]:
        """Returns a forward hook that records fingerprints of the outputs of layer number `layer`."""

        def hook(module: nn.Module, inputs: Any, outputs: object) -> None:
            running = self._engine.running
            kind = AGAIN if running.op is Op.RECOMPUTE else OUTPUT
            for number, tensor in enumerate(as_tensors(outputs)):
                point = Point(self._replica, running.micro_batch, layer, number)
                self.seen.append((kind, point, fingerprint(tensor)))

        return hook

    @contextmanager
    def _around_update(self, result: StepResult) -> Iterator[None]:
        """Writes the gradients before the update, whole and not yet clipped, and the weights after it."""
        number, self.result = result.plan.step + 1, result
        for layer in self._layers if self._replica == 0 else []:
            own = {name: p.grad for name, p in named(layer).items() if p.grad is not None}
            self._spill.put(f"gradients {number}", layer.index, own)
        yield
        self.hold(number)


def held_by(layer: BuiltLayer, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns weights, buffers and optimizer state of a layer, by ``kind/name`` with the name in the whole model.

    Args:
        states: parameter's name in the layer -> the optimizer's state of it.
    """
    held: dict[str, Tensor] = {f"weight/{name}": parameter for name, parameter in named(layer).items()}
    held |= {f"buffer/{name}": buffer for name, buffer in named_buffers(layer).items()}
    for parameter, values in states.items():
        numbers = {key: value for key, value in values.items() if isinstance(value, (Tensor, int, float))}
        held |= {f"state/{layer.name}.{parameter}:{key}": torch.as_tensor(value) for key, value in numbers.items()}
    return held
