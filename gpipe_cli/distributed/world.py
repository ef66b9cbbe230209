"""Where this worker stands: its replica, its place in the pipeline, its device and the groups it talks in."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import ConfigurationError
from ..gpus import count_gpus
from ..launch.context import GROUP_TIMEOUT_SECONDS, Context

Value = TypeVar("Value")

_CPU = "cpu"  # the identity of a device that is no GPU


@dataclass(frozen=True)
class World:
    """Ranks are numbered replica by replica: rank = replica · workers + worker.

    Attributes:
        workers, replicas: W and D; together W·D ranks.
        device: of this worker.
        wire: where messages between workers travel: the device with NCCL, else the CPU.
        everyone: group of all ranks for CPU tensors; None when there is only one.
        directions: groups for activations and for gradients; with NCCL two of each, see `Transport`.
        same_worker: the ranks that hold the same layers in the other replicas; None without replicas.
        shared_memory: messages from CPU to CPU within a machine go through memory that both workers see.
    """

    rank: int
    workers: int
    replicas: int
    device: torch.device
    wire: torch.device
    everyone: dist.ProcessGroup | None
    directions: tuple[dist.ProcessGroup, ...] | None
    same_worker: dist.ProcessGroup | None
    shared_memory: bool = True

    @property
    def size(self) -> int:
        return self.workers * self.replicas

    @property
    def replica(self) -> int:
        return self.rank // self.workers

    @property
    def worker(self) -> int:
        return self.rank % self.workers

    @property
    def reads_data(self) -> bool:
        """Only the first worker of a replica reads data; targets travel with their micro-batch."""
        return self.worker == 0

    def rank_of(self, worker: int) -> int:
        """Global rank of another worker of the same replica."""
        return self.replica * self.workers + worker

    def tell_everyone(self, make: Callable[[], Value]) -> Value:
        """What ``make`` returns on rank 0, on every rank; the others wait for it."""
        value = [make() if self.rank == 0 else None]
        if self.everyone is not None:
            dist.broadcast_object_list(value, src=0, group=self.everyone, device=torch.device("cpu"))
        return cast(Value, value[0])

    def gather_everyone(self, value: Value) -> list[Value]:
        """Every rank's ``value``, in rank order, on every rank."""
        if self.everyone is None:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.everyone)
        return values


def join_world(context: Context, workers: int, replicas: int, device: str, backend: str) -> World:
    """Chooses the device, joins the process group and makes the smaller groups.

    Args:
        workers, replicas: W and D; W·D is the number of ranks.
        device: auto, cpu or cuda.
        backend: auto, gloo or nccl. ``auto`` is NCCL when every worker of the job has a GPU of its own; else workers
            talk through the CPU, by memory that they share where they are on one machine, by gloo where they are not.

    Raises:
        ValueError: the number of ranks is not W·D.
        ConfigurationError: a GPU is asked for, or there, that cannot be used; or NCCL without a GPU for each worker.
    """
    if context.world_size != workers * replicas:
        raise ValueError(f"{context.world_size} workers were started for {workers} × {replicas} replicas")
    chosen = _choose_device(context, device)
    name = _choose_backend(context, chosen, backend)
    wire = chosen if name == "nccl" else torch.device("cpu")
    if context.world_size == 1:
        return World(0, 1, 1, chosen, wire, None, None, None)
    context.init_process_group("cpu:gloo,cuda:nccl" if name == "nccl" else "gloo")
    everyone = dist.group.WORLD
    assert everyone is not None
    # NCCL runs the messages between two ranks of a group in one order: a group for each kind and way keeps all apart.
    directions = tuple(_new_group(None) for _ in range(4)) if name == "nccl" else (everyone, everyone)
    same_worker: dist.ProcessGroup | None = None
    if replicas > 1:
        for worker in range(workers):  # every rank takes part in making every group
            group = _new_group([replica * workers + worker for replica in range(replicas)])
            if context.rank % workers == worker:
                same_worker = group
    shared_memory = backend != "gloo"
    return World(context.rank, workers, replicas, chosen, wire, everyone, directions, same_worker, shared_memory)


def _new_group(ranks: list[int] | None) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(ranks))


def _choose_device(context: Context, device: str) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        _refuse_to_do_without_gpu(device)
        return torch.device("cpu")
    chosen = torch.device("cuda", context.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def _refuse_to_do_without_gpu(device: str) -> None:
    """``auto`` is the CPU only where there is no GPU: weeks of computing must not go to CPUs for an old driver's sake.

    Raises:
        ConfigurationError: `pipeline.device=cuda`, or a GPU that torch cannot use.
    """
    present, host = count_gpus(), socket.gethostname()
    if present:
        made_for = f"made for CUDA {torch.version.cuda}" if torch.version.cuda else "made for CPUs alone"
        raise ConfigurationError(
            f"pipeline.device={device}: there {'is 1 GPU' if present == 1 else f'are {present} GPUs'} on {host}, but "
            f"torch {torch.__version__} ({made_for}) cannot use them: update the NVIDIA driver or install a torch that "
            "fits it; to compute on CPUs use pipeline.device=cpu, or hide the GPUs by CUDA_VISIBLE_DEVICES=-1"
        )
    if device == "cuda":
        raise ConfigurationError(
            f"pipeline.device=cuda: there is no GPU on {host} that CUDA programs see (nvidia-smi, "
            "CUDA_VISIBLE_DEVICES): use pipeline.device=cpu, or auto"
        )


def _choose_backend(context: Context, device: torch.device, backend: str) -> str:
    """The same on every rank, because all look at the devices of all.

    Raises:
        ConfigurationError: `pipeline.backend=nccl` without a GPU for each.
    """
    if context.world_size == 1:  # sends nothing
        return "nccl" if device.type == "cuda" and backend != "gloo" else "gloo"
    if backend == "gloo":
        return backend
    devices = _devices_of_all(context, device)
    problems = _reasons_against_nccl(devices)
    if not problems:
        return "nccl"
    if backend == "nccl":
        raise ConfigurationError(
            f"pipeline.backend=nccl needs a GPU of its own for every worker, but {'; '.join(problems)}: "
            "use pipeline.backend=auto, or as many workers on each machine as it has GPUs"
        )
    if context.rank == 0 and any(each != _CPU for each in devices):
        text = f"workers send through the CPU, which is slower than from GPU to GPU: {'; '.join(problems)}"
        context.emit({"kind": "warning", "text": text})
    return "gloo"


def _reasons_against_nccl(devices: Sequence[str]) -> list[str]:
    """In words, with the ranks; ``devices`` are those of all ranks by their identity."""
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(rank)
    without = ranks.pop(_CPU, [])
    named = {device: ", ".join(map(str, users)) for device, users in ranks.items() if len(users) > 1}
    alone = [f"{'ranks' if len(without) > 1 else 'rank'} {', '.join(map(str, without))} on the CPU"] if without else []
    return [*alone, *(f"ranks {users} on one GPU" for users in named.values())]


def _devices_of_all(context: Context, device: torch.device) -> list[str]:
    """The identity of every rank's device, in rank order; waits for the others."""
    store = dist.PrefixStore("devices", context.store)
    store.set(str(context.rank), _identity(device))
    keys = [str(rank) for rank in range(context.world_size)]
    store.wait(keys, timedelta(seconds=GROUP_TIMEOUT_SECONDS))
    return [store.get(key).decode() for key in keys]


def _identity(device: torch.device) -> str:
    """What tells this device from every other of the job.

    A GPU's is its machine and its place there, by which NCCL tells them apart: slices of one GPU (MIG) have different
    uuids, but NCCL refuses them as one.
    """
    if device.type == "cpu":
        return _CPU
    properties: Any = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return f"{_this_machine()} {properties.uuid if None in place else ':'.join(map(str, place))}"


def _this_machine() -> str:
    """The boot's number, which containers of one machine share; the name where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
