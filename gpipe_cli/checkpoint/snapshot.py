"""Checkpoints of a running model: snapshot, writing in the background, loading.

One ``.safetensors`` file per layer, with tensors named ``weight:<parameter>``, ``buffer:<name>``,
``average:<parameter or buffer>`` (`average.py`) and ``optimizer:<state key>:<parameter>``; optimizer values that are no
tensors stand as JSON in the file's metadata.
Loading executes no code; torch.distributed.checkpoint is not used because its ``.metadata`` file is a pickle.

How workers save together, given that they meet once per training step:

1. every worker calls ``begin(step, layers)`` and goes on training while a thread writes its files;
2. every worker reports ``finished_step`` in each meeting;
3. when all have reported the step, worker 0 calls ``commit``, which makes the checkpoint complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from . import commit as checkpoint_commit
from . import files as checkpoint_files
from .files import CheckpointError, CheckpointInfo, LayerFile, RunState

OptimizerValue: TypeAlias = "Tensor | bool | int | float | str | None"


@dataclass(frozen=True)
class LayerState:
    """What a checkpoint holds of one layer.

    Attributes:
        weights: parameters by their name inside the layer.
        buffers: persistent buffers, likewise.
        optimizer: parameter name -> state key -> value; parameters without optimizer state are absent.
        averages: moving averages of weights and buffers by the same names; empty where the run keeps none.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, OptimizerValue]] = field(default_factory=dict)
    averages: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def averaged(self) -> dict[str, Tensor]:
        """Weights and buffers by name, with the averages in place of those that have one."""
        return {**self.weights, **self.buffers, **self.averages}


# --- between a layer and its state -----------------------------------------------------------------------------------


def layer_state(
    module: nn.Module, optimizer: Optimizer | None, averages: Mapping[str, Tensor] | None = None
) -> LayerState:
    """The state of one layer. Refers to the live tensors: ``CheckpointWriter.begin`` copies them, others must too.

    Args:
        optimizer: the worker's one optimizer over all its layers; None for a state without optimizer.
        averages: of the layer; None: there are none.

    Raises:
        CheckpointError: the optimizer keeps something other than tensors, numbers, strings and None per parameter.
    """
    weights, buffers = named_tensors(module)
    kept: dict[str, Mapping[str, OptimizerValue]] = {}
    for name, parameter in weights.items():
        values = optimizer.state.get(parameter) if optimizer is not None else None
        if values:
            for key, value in values.items():
                _require_storable(optimizer, name, key, value)
            kept[name] = dict(values)
    return LayerState({name: weight.detach() for name, weight in weights.items()}, buffers, kept, averages or {})


@torch.no_grad()
def restore_layer(name: str, module: nn.Module, optimizer: Optimizer | None, state: LayerState) -> None:
    """Put a saved state into layer ``name``: weights and buffers in place, optimizer state as copies.

    Parameters that were saved without optimizer state end without it. Values keep their dtype bit for bit, which
    ``Optimizer.load_state_dict`` does not promise (it casts state to the parameter's dtype).

    Raises:
        CheckpointError: names, shapes or dtypes differ; the layer is then unchanged.
    """
    weights, buffers = named_tensors(module)
    _require_match(name, "parameter", weights, state.weights)
    _require_match(name, "buffer", buffers, state.buffers)
    for own, saved in ((weights, state.weights), (buffers, state.buffers)):
        for key, tensor in own.items():
            tensor.copy_(saved[key])
    if optimizer is None:
        return
    cpu = torch.device("cpu")
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for key, parameter in weights.items():
        optimizer.state.pop(parameter, None)
        if values := state.optimizer.get(key):
            on_device = any(groups.get(parameter, {}).get(option) for option in ("capturable", "fused"))
            optimizer.state[parameter] = {
                # torch's own rule: step counters stay on the CPU unless the update runs in a fused or captured kernel
                state_key: _copy(value, cpu if state_key == "step" and not on_device else parameter.device)
                if isinstance(value, Tensor)
                else value
                for state_key, value in values.items()
            }


def named_tensors(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Parameters and persistent buffers; under all their names, as in ``state_dict``, where a layer shares them."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in persistent}
    return dict(module.named_parameters(remove_duplicate=False)), buffers


def _require_storable(optimizer: Optimizer | None, parameter: str, key: str, value: object) -> None:
    if isinstance(value, Tensor | bool | int | float | str | None) and ":" not in key:
        return
    raise CheckpointError(
        f"{type(optimizer).__name__} keeps {key!r} of parameter {parameter} as {type(value).__name__}; a checkpoint "
        "holds tensors, numbers, strings and None under keys without a colon: choose another optimizer"
    )


def _require_match(layer: str, kind: str, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    faults = [f"{kind} {name} is not in the checkpoint" for name in own if name not in saved]
    faults += [f"{kind} {name} is in the checkpoint, not in the model" for name in saved if name not in own]
    faults += [
        f"{kind} {name} should be {_form(own[name])}, the checkpoint has {_form(saved[name])}"
        for name in own
        if name in saved and (own[name].shape, own[name].dtype) != (saved[name].shape, saved[name].dtype)
    ]
    if faults:
        raise CheckpointError(f"layer {layer} does not fit its checkpoint: {checkpoint_files.shorten(faults)}")


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _copy(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """On the CPU unless a device is given; contiguous, as a file needs it."""
    return tensor.detach().to(device or "cpu", copy=True, memory_format=torch.contiguous_format)


# --- writing ---------------------------------------------------------------------------------------------------------


class CheckpointWriter:
    """One worker's side of saving. All methods belong to the worker's main thread.

    What fails in the background is raised by the next call of any method, as a CheckpointError. An old checkpoint that
    could not be deleted is only a warning: see `take_warnings`.

    Args:
        run_dir: the run directory, on a file system that all workers share.
        worker: this worker's number, 0 … workers−1. Worker 0 commits.
        model: parameter names of every layer of the whole model, in model order; only worker 0 needs it.
        keep: how many checkpoints to keep beside the best one. On disk there is for a while one more.
    """

    def __init__(self, run_dir: Path, worker: int, model: Mapping[str, Collection[str]], keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep}: at least the newest checkpoint is kept, use 1 or more")
        self._run_dir = run_dir
        self._worker = worker
        self._model = model
        self._keep = keep
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[None]] = []
        self._finished_step = -1
        self._warnings: list[str] = []
        self._undeleted: set[Path] = set()  # of which a warning has told

    def begin(self, step: int, layers: Mapping[str, LayerState]) -> None:
        """Copy ``layers`` to the CPU and start writing them; waits first if the previous step is still being written.

        Every worker calls it for the same step. With replicas each layer is given by one worker only, the others give
        what is left, perhaps nothing.
        """
        self.wait()
        snapshot = {name: _snapshot(state) for name, state in layers.items()}
        self._jobs.append(self._background.submit(self._write, step, snapshot))

    @property
    def finished_step(self) -> int:
        """The last step whose files of this worker are on disk, −1 before the first: what it reports to the others."""
        self._raise_failure()
        return self._finished_step

    def commit(self, step: int, state: RunState, workers: int, best: tuple[str, float] | None = None) -> CheckpointInfo:
        """Make the checkpoint complete (worker 0, once all workers have reported ``step``), then prune older ones.

        Args:
            best: metric name and value if this checkpoint is the best so far.

        Raises:
            CheckpointError: what was saved is not the whole model; the missing layers and parameters are named.
        """
        self._raise_failure()
        try:
            info = checkpoint_commit.complete(self._run_dir, step, state, workers, self._model)
            if best is not None:
                checkpoint_commit.record_best(self._run_dir, step, *best)
        except OSError as error:
            raise self._failure(f"completing the checkpoint of step {step}", error) from error
        self._jobs.append(self._background.submit(self._prune))
        return info

    def amend(self, step: int, state: RunState, best: tuple[str, float] | None = None) -> None:
        """Give the complete checkpoint of ``step`` another run state (worker 0); ``best`` as in `commit`.

        A new best one replaces another, which is then pruned.
        """
        try:
            checkpoint_commit.amend(self._run_dir, step, state)
            if best is not None:
                checkpoint_commit.record_best(self._run_dir, step, *best)
        except OSError as error:
            raise self._failure(f"amending the checkpoint of step {step}", error) from error
        if best is not None:
            self._jobs.append(self._background.submit(self._prune))

    def wait(self) -> None:
        """Return when everything begun is on disk: before the last report, and at the end of the run."""
        while self._jobs:
            self._jobs.pop(0).result()

    def take_warnings(self) -> list[str]:
        """What has gone wrong in the background without harm, since the last call."""
        taken = self._warnings[:]
        del self._warnings[: len(taken)]
        return taken

    def _write(self, step: int, layers: Mapping[str, LayerState]) -> None:
        directory = checkpoint_files.partial_directory(self._run_dir, step)
        try:
            (directory / "layers").mkdir(parents=True, exist_ok=True)
            files = {name: write_layer(directory, name, state) for name, state in layers.items()}
            checkpoint_commit.sync_directory(directory / "layers")
            checkpoint_commit.write_part(directory, self._worker, files)
        except (OSError, SafetensorError) as error:
            raise self._failure(f"writing {directory}", error) from error
        self._finished_step = step

    def _prune(self) -> None:
        """Never fails: the weights are safe, and the next checkpoint tries it again."""
        try:
            failed = checkpoint_commit.prune(self._run_dir, self._keep)
        except (OSError, CheckpointError) as error:
            home = checkpoint_files.checkpoints_directory(self._run_dir)
            failed = {home: f"no checkpoint in {home} was deleted ({error}): the next checkpoint tries it again"}
        self._warnings += [text for path, text in failed.items() if path not in self._undeleted]
        self._undeleted = set(failed)

    def _raise_failure(self) -> None:
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()

    def _failure(self, action: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"worker {self._worker}, {action}: {error}. Earlier checkpoints are untouched: free disk space or restore "
            f"the right to write, then type checkpoint.resume={self._run_dir}"
        )


def write_layer(directory: Path, name: str, state: LayerState) -> LayerFile:
    """Write one layer's file into a checkpoint directory and put it on disk."""
    path = checkpoint_files.layer_path(directory, name)
    temporary = checkpoint_files.with_suffix(path, ".tmp")
    tensors, metadata = _to_file(state)
    save_file(tensors, temporary, {"layer": name, **metadata})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    checksum = checkpoint_files.sha256_of(temporary)
    temporary.replace(path)
    return LayerFile(size, checksum, tuple(state.weights))


def _snapshot(state: LayerState) -> LayerState:
    return LayerState(
        {name: _copy(tensor) for name, tensor in state.weights.items()},
        {name: _copy(tensor) for name, tensor in state.buffers.items()},
        {
            name: {key: _copy(value) if isinstance(value, Tensor) else value for key, value in values.items()}
            for name, values in state.optimizer.items()
        },
        {name: _copy(tensor) for name, tensor in state.averages.items()},
    )


def _to_file(state: LayerState) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors = {f"weight:{name}": tensor for name, tensor in state.weights.items()}
    tensors |= {f"buffer:{name}": tensor for name, tensor in state.buffers.items()}
    tensors |= {f"average:{name}": tensor for name, tensor in state.averages.items()}
    values: dict[str, dict[str, OptimizerValue]] = {}
    for name, entries in state.optimizer.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer:{key}:{name}"] = value
            else:
                values.setdefault(name, {})[key] = value
    return tensors, {"optimizer": json.dumps(values)}


# --- loading ---------------------------------------------------------------------------------------------------------


def load_layer(info: CheckpointInfo, name: str) -> LayerState:
    """Read one layer, on the CPU, its file's checksum verified first.

    Raises:
        CheckpointError: the checkpoint has no such layer, or its file is damaged.
    """
    if name not in info.layers:
        raise CheckpointError(
            f"{info.path} has no layer {name}: it holds {checkpoint_files.shorten(list(info.layers))}; "
            "give the model settings (model.*) it was made with"
        )
    checkpoint_files.verify_checksum(info, name)
    parts: dict[str, dict[str, Tensor]] = {"weight": {}, "buffer": {}, "average": {}}
    optimizer: dict[str, dict[str, OptimizerValue]] = {}
    try:
        with safe_open(info.layer_path(name), framework="pt", device="cpu") as file:
            optimizer.update(json.loads((file.metadata() or {}).get("optimizer", "{}")))
            for key in file.keys():  # noqa: SIM118 (not a dict)
                kind, _, rest = key.partition(":")
                tensor = file.get_tensor(key).clone()  # own memory, not a view of a file that pruning may delete
                if kind == "optimizer":
                    state_key, _, parameter = rest.partition(":")
                    optimizer.setdefault(parameter, {})[state_key] = tensor
                else:
                    parts[kind][rest] = tensor
        weights = {parameter: parts["weight"].pop(parameter) for parameter in info.layers[name].parameters}
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{info.layer_path(name)} is not the layer file of its manifest: {error!r}") from error
    return LayerState(weights, parts["buffer"], optimizer, parts["average"])


def export_state_dict(info: CheckpointInfo, average: bool = False) -> dict[str, Tensor]:
    """The whole model as one plain state_dict on the CPU: ``<layer name>.<parameter or buffer>``, in model order.

    Args:
        average: the moving averages in place of the weights and statistics themselves.

    Raises:
        CheckpointError: averages are wanted and the run kept none.
    """
    exported: dict[str, Tensor] = {}
    found = False
    for layer in info.layers:
        state = load_layer(info, layer)
        found = found or bool(state.averages)
        chosen = state.averaged if average else {**state.weights, **state.buffers}
        exported.update({f"{layer}.{name}": tensor for name, tensor in chosen.items()})
    if average and not found:
        raise CheckpointError(
            f"{info.path} holds no averages, because its run kept none (trainer.average=null): leave out average=true"
        )
    return exported
