"""Where this worker stands: its replica, its place in the pipeline, its device and the groups it talks in."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from ..launch.context import Context


@dataclass(frozen=True)
class World:
    """Ranks are numbered replica by replica: rank = replica · workers + worker.

    Attributes:
        workers, replicas: W and D; together W·D ranks.
        device: of this worker.
        wire: where messages between workers travel: the device with NCCL, the CPU with gloo.
        everyone: group of all ranks for CPU tensors; None when there is only one.
        directions: groups for activations and for gradients; with NCCL two of each, see `Transport`.
        same_worker: the ranks that hold the same layers in the other replicas; None without replicas.
    """

    rank: int
    workers: int
    replicas: int
    device: torch.device
    wire: torch.device
    everyone: dist.ProcessGroup | None
    directions: tuple[dist.ProcessGroup, ...] | None
    same_worker: dist.ProcessGroup | None

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

    def tell_everyone(self, make: Callable[[], object]) -> object:
        """What ``make`` returns on rank 0, on every rank; the others wait for it."""
        value = [make() if self.rank == 0 else None]
        if self.everyone is not None:
            dist.broadcast_object_list(value, src=0, group=self.everyone, device=torch.device("cpu"))
        return value[0]

    def gather_everyone(self, value: object) -> list[object]:
        """Every rank's ``value``, in rank order, on every rank."""
        if self.everyone is None:
            return [value]
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value, group=self.everyone)
        return values


def join_world(context: Context, workers: int, replicas: int, device: str, backend: str) -> World:
    """Chooses the device, joins the process group and makes the smaller groups.

    Args:
        workers, replicas: W and D; W·D is the number of ranks.
        device: auto, cpu or cuda.
        backend: auto, gloo or nccl. ``auto`` is NCCL when every worker of the machine has a GPU of its own; several
            workers on one GPU talk by gloo, through the CPU.

    Raises:
        ValueError: the number of ranks is not W·D.
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
    return World(context.rank, workers, replicas, chosen, wire, everyone, directions, same_worker)


def _new_group(ranks: list[int] | None) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(ranks))


def _choose_device(context: Context, device: str) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    chosen = torch.device("cuda", context.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def _choose_backend(context: Context, device: torch.device, backend: str) -> str:
    if backend != "auto":
        return backend
    local = int(os.environ.get("LOCAL_WORLD_SIZE", context.world_size))  # torchrun sets it
    return "nccl" if device.type == "cuda" and torch.cuda.device_count() >= local else "gloo"
