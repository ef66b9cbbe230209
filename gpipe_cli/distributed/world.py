"""Defines `World`: this process's rank, replica, device and process groups; and how all ranks exchange values.

Over the tree of ranks log2(W) messages go up to rank 0, and as many down again (docs/cluster.md has its seconds by
workers). The children of rank r are r + 1, r + 2, r + 4, … below r's lowest set bit: a subtree is a range of ranks, and
the ranks of one machine add up before they send to others. The messages are plain ones, because gloo's own sum goes
round a ring of W ranks.
"""

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigurationError
from ..launch.context import GROUP_TIMEOUT_SECONDS, Context
from ..launch.join import adopt_step, check_rank, local_rank
from ..launch.messenger import LOCAL
from .device import NCCL2, choose_backend, choose_device, device_identity, nccl_kind

GROUP_TIMEOUT = timedelta(seconds=GROUP_TIMEOUT_SECONDS)  # torch gives NCCL ten minutes: too few while a peer compiles
EXCHANGE, VALUES = 10, 11  # message tags, beyond those of the pipeline's messages (`transport.py`)
TIMEOUT_OF_GROUP = timedelta(0)


# -- the tree of ranks -------------------------------------------------------------------------------------------------


def family(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Returns the parent of a rank (None for rank 0) and its children, in the tree of ``size`` ranks."""
    # A child lies a power of two behind its parent, below the parent's lowest set bit.
    distances = (1 << bit for bit in range(((rank & -rank or size) - 1).bit_length()))
    return rank & (rank - 1) if rank else None, [rank + far for far in distances if rank + far < size]


class Tree:
    """Passes CPU tensors and bytes between this rank, its parent and its children.

    Args:
        group: all ranks; None when there is only one.
        tag: tag of all messages, which only their order tells apart.

    Attributes:
        parent: rank; None on rank 0.
        children: ranks, in order. The subtree of each ends where that of the next begins.
    """

    def __init__(self, group: dist.ProcessGroup | None, tag: int) -> None:
        self._group, self._tag = group, tag
        self.parent, self.children = (None, []) if group is None else family(group.rank(), group.size())

    def add_up(self, own: Tensor, timeout: timedelta = TIMEOUT_OF_GROUP) -> Tensor:
        """Returns the sum of all ranks' ``own`` on every rank. It overwrites ``own`` with the sum of the subtree."""
        shares = [torch.empty_like(own) for _ in self.children]
        works = [self._receive(share, child) for share, child in zip(shares, self.children, strict=True)]
        for work, share in zip(works, shares, strict=True):
            work.wait(timeout)
            own += share
        total = own.clone()
        if self.parent is not None:
            answer = self._receive(total, self.parent)
            self._send([own], [self.parent], timeout)
            answer.wait(timeout)
        self._send([total], self.children, timeout)
        return total

    def gather(self, own: bytes) -> bytes:
        """Returns the ``own`` of all ranks of this rank's subtree, in their order, with commas between.

        On rank 0 these are all ranks.
        """
        content = b",".join([own, *(self._receive_bytes(child) for child in self.children)])
        if self.parent is not None:
            self._send(_packed(content), [self.parent])
        return content

    def spread(self, content: bytes) -> bytes:
        """Returns rank 0's ``content`` on every rank."""
        content = content if self.parent is None else self._receive_bytes(self.parent)
        self._send(_packed(content), self.children)
        return content

    def _receive_bytes(self, rank: int) -> bytes:
        """Waits for the bytes that another rank sends as `_packed`."""
        size = torch.empty(1, dtype=torch.int64)
        self._receive(size, rank).wait()
        content = torch.empty(int(size), dtype=torch.uint8)
        self._receive(content, rank).wait()
        return content.numpy().tobytes()

    def _receive(self, tensor: Tensor, rank: int) -> dist.Work:
        """Starts to receive a tensor's values from a rank; the caller waits."""
        work = dist.irecv(tensor, group_src=rank, group=self._group, tag=self._tag)
        assert work is not None  # torch returns None to ranks outside the group; here every rank is inside
        return work

    def _send(self, tensors: list[Tensor], ranks: list[int], timeout: timedelta = TIMEOUT_OF_GROUP) -> None:
        """Sends all tensors to each of the ranks, and waits until they have left.

        The last rank comes first, because its subtree is the deepest.
        """
        pairs = [(rank, tensor) for rank in reversed(ranks) for tensor in tensors]
        for work in [dist.isend(tensor, group_dst=rank, group=self._group, tag=self._tag) for rank, tensor in pairs]:
            assert work is not None
            work.wait(timeout)


def _packed(content: bytes) -> list[Tensor]:
    """Returns two tensors to send: the number of bytes, and the bytes."""
    return [torch.tensor([len(content)]), torch.frombuffer(bytearray(content), dtype=torch.uint8)]


# -- a vector of numbers -----------------------------------------------------------------------------------------------


class Exchange:
    """Sums a vector of named fields over all workers.

    Each slot of the vector is written by one worker and is 0 on the others. Adding zeros is exact, so every worker
    reads the same bits, whatever K. Every decision taken from the sum (skip the update, stop, clip by this factor) is
    therefore the same on all workers without another message.

    Args:
        fields: number of slots by name; the same on every worker.
        group: all workers, for CPU tensors; None when there is only one worker.

    Attributes:
        own: slots that this worker writes before `run`, by field.
        total: sums of the last `run`, by field.
        ended_at: moment at which `run` last ended, in seconds of `time.perf_counter`; about the same on all workers.
    """

    def __init__(self, fields: Mapping[str, int], group: dist.ProcessGroup | None) -> None:
        self._tree = Tree(group, EXCHANGE)
        self._sizes = list(fields.values())
        self._vector = torch.zeros(sum(self._sizes), dtype=torch.float64)
        self.own: dict[str, Tensor] = dict(zip(fields, torch.split(self._vector, self._sizes), strict=True))
        self.total: dict[str, Tensor] = {name: tensor.clone() for name, tensor in self.own.items()}
        self.ended_at = time.perf_counter()

    def run(self) -> None:
        """Sums ``own`` of all workers into ``total`` and sets ``own`` to 0; every worker calls it at the same time."""
        total = self._tree.add_up(self._vector)
        self.total = dict(zip(self.own, torch.split(total, self._sizes), strict=True))
        self._vector.zero_()
        self.ended_at = time.perf_counter()


# -- values as JSON: what comes over a process group is never unpickled ------------------------------------------------


def all_gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns every worker's ``value`` on all workers, in the group's order, as JSON keeps it: tuples become lists.

    Args:
        group: all workers, for CPU tensors; None when there is only one.

    Raises:
        ValueError: what arrives is no JSON.
    """
    tree = Tree(group, VALUES)
    return list(json.loads(b"[%b]" % tree.spread(tree.gather(json.dumps(value).encode()))))


# -- this process among all --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Holds this process's rank, replica, device and process groups.

    Ranks are numbered replica by replica: rank = replica · workers + worker, on whatever node `pipeline.placement` puts
    it; the launcher's numbers, by which logs are named, go node by node.

    Attributes:
        workers, replicas: W and D; together W·D ranks.
        device: this worker's device.
        wire: the device whose tensors are sent between workers: `device` with NCCL, else the CPU.
        all_ranks: group of all ranks for CPU tensors; None when there is only one rank.
        message_groups: groups for activations and for gradients; with NCCL two of each, see `Transport`.
        replica_group: the ranks that hold the same layers, one of each replica; None without replicas.
        members: rank in torch's default group of each rank of this world; empty: the ranks are the same.
    """

    rank: int
    workers: int
    replicas: int
    device: torch.device
    wire: torch.device
    all_ranks: dist.ProcessGroup | None
    message_groups: tuple[dist.ProcessGroup, ...] | None
    replica_group: dist.ProcessGroup | None
    members: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.workers * self.replicas

    @property
    def replica(self) -> int:
        """Returns the number of this process's replica, from 0."""
        return self.rank // self.workers

    @property
    def worker(self) -> int:
        """Returns the number of this process's worker in its replica, from 0."""
        return self.rank % self.workers

    @property
    def reads_data(self) -> bool:
        """Returns whether this is the first worker of a replica; targets travel with their micro-batch."""
        return self.worker == 0

    @property
    def sums_beside_computations(self) -> bool:
        """Returns whether a sum over the replicas goes on while this worker computes, and needs no copy to the host."""
        backend = None if self.replica_group is None else dist.get_backend(self.replica_group)
        return self.wire == self.device and backend not in (None, LOCAL)

    def rank_of(self, worker: int) -> int:
        """Returns the rank of a worker of this replica, in torch's default group."""
        rank = self.replica * self.workers + worker
        return self.members[rank] if self.members else rank

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Calls ``make`` on rank 0 and returns its result on every rank, as JSON keeps it."""
        made = json.dumps(make()).encode() if self.rank == 0 else b""
        return json.loads(Tree(self.all_ranks, VALUES).spread(made))

    def all_gather(self, value: Any) -> list[Any]:
        """Returns every rank's ``value``, in rank order, on every rank, as JSON keeps it."""
        return all_gather_json(value, self.all_ranks)

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's ``value``, in rank order, on rank 0, and an empty list elsewhere, as JSON keeps it."""
        everyone = Tree(self.all_ranks, VALUES).gather(json.dumps(value).encode())
        return json.loads(b"[%b]" % everyone) if self.rank == 0 else []

    def gather_from_workers(self, values: Iterable[Any]) -> list[Any]:
        """Returns on every rank the values of all workers of replica 0 in one list, in the workers' order.

        They are as JSON keeps them.
        """
        own = list(values) if self.replica == 0 else []
        return [value for values in self.all_gather(own) for value in values]


def join_world(context: Context, workers: int, replicas: int, device: str, backend: str) -> World:
    """Chooses the device, joins the process group and makes the smaller groups.

    Args:
        workers, replicas: W and D; W·D is the number of ranks.
        device: auto, cpu or cuda.
        backend: auto, gloo or nccl. ``auto`` is NCCL when every worker of the job has a GPU of its own. Otherwise
            messages go through the CPU: by shared memory and sockets without names between the workers that
            gpipe-train has started, by gloo under torchrun.

    Raises:
        ConfigurationError: a GPU is requested or present but cannot be used, or NCCL without a GPU for each worker.
    """
    chosen = choose_device(context, device)
    name = choose_backend(context, device_identity(chosen), backend)
    wire = chosen if name == "nccl" else torch.device("cpu")
    if context.world_size == 1:
        return World(0, 1, 1, chosen, wire, None, None, None)
    for_cpu = LOCAL if context.messenger is not None and backend != "gloo" else "gloo"
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else everyone connects to everyone, and reads W² addresses
    kind = nccl_kind() if name == "nccl" else None
    context.init_process_group(name if name == "nccl" else for_cpu, chosen if kind == NCCL2 else None)
    if kind is not None and context.rank == 0:
        context.emit({"kind": "message", "text": f"messages between GPUs: torch's {kind}"})
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    all_ranks = world
    message_groups: tuple[dist.ProcessGroup, ...] = (world, world)
    if name == "nccl":
        all_ranks = _new_group(None, for_cpu)
        # NCCL runs the messages between two ranks of a group in one order, so each kind and direction has its own.
        message_groups = tuple(_new_group(None) for _ in range(4))
    # torch makes a group on all ranks, also on those outside it.
    replica_group = _replica_group(context.rank, workers, replicas, range(workers), lambda ranks: _new_group([*ranks]))
    return World(context.rank, workers, replicas, chosen, wire, all_ranks, message_groups, replica_group)


def join_torchrun(replicas: int, device: str, backend: str, group: dist.ProcessGroup | None = None) -> World:
    """Joins the processes that torchrun or srun has started, as workers of replicas; or this process alone.

    Args:
        group: group of the processes, where the program has made one.

    Raises:
        ConfigurationError: the processes are not as many in each replica; else as `join_world`.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        adopt_step(os.environ)
        check_rank(os.environ, trains=True)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # A program that has chosen a GPU keeps it.
    place = (torch.cuda.is_initialized() and torch.cuda.current_device()) or local_rank()  # type: ignore[no-untyped-call]

    def open_store() -> dist.Store:
        return cast(dist.Store, next(iter(dist.rendezvous("env://")))[0])

    def warn(event: dict[str, Any]) -> None:
        warnings.warn(event["text"], stacklevel=2)

    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        context = Context(rank, size, place, Path.cwd(), open_store, warn, lambda: False)
        return join_world(context, _divided(size, replicas), replicas, device, backend)
    if not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(f"Pipeline.of(group={group!r}): torch.distributed.new_group(ranks) makes a group")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ConfigurationError("Pipeline.of(group=...): this process is none of the group; only its members call it")
    members, workers = tuple(dist.get_process_group_ranks(group)), _divided(size, replicas)
    is_part = size < dist.get_world_size()

    def new_group(ranks: range, backend: str) -> dist.ProcessGroup:
        """Makes a group for this pipeline alone, so that messages of others, or the program's, are not mistaken."""
        of_all = [members[rank] for rank in ranks]
        return _new_group(of_all, backend, alone=is_part)

    control = new_group(range(size), "gloo")
    joined = _Joined(rank, size, place, Path.cwd(), open_store, warn, lambda: False, control=control)
    chosen = choose_device(joined, device)
    name = choose_backend(joined, device_identity(chosen), backend)
    wire = chosen if name == "nccl" else torch.device("cpu")
    messages: tuple[dist.ProcessGroup, ...] = (control, control)
    if name == "nccl" and size > 1:
        messages = tuple(new_group(range(size), name) for _ in range(4))
    own = rank % workers  # of a part only the members of each group make it
    made = range(own, own + 1) if is_part else range(workers)
    replica_group = _replica_group(rank, workers, replicas, made, partial(new_group, backend=name))
    return World(rank, workers, replicas, chosen, wire, control, messages, replica_group, members)


def _replica_group(
    rank: int, workers: int, replicas: int, made: range, new_group: Callable[[range], dist.ProcessGroup]
) -> dist.ProcessGroup | None:
    """Returns the group of the ranks that hold the same layers as this one; None without replicas.

    Args:
        made: workers whose group this rank helps to make.
        new_group: makes the group of some ranks.
    """
    if replicas == 1:
        return None
    return {worker: new_group(range(worker, replicas * workers, workers)) for worker in made}[rank % workers]


def _divided(size: int, replicas: int) -> int:
    """Returns the number of workers of each replica.

    Raises:
        ConfigurationError: the processes cannot be divided so.
    """
    if size % replicas:
        raise ConfigurationError(f"replicas={replicas} does not divide {size} processes: start a multiple of it")
    return size // replicas


@dataclass
class _Joined(Context):
    """Describes this process's place in a group that the program has made."""

    control: dist.ProcessGroup | None = None

    def decide(self, name: str, own: str, choose: Callable[[list[str]], str], seconds: float = 0.0) -> str:
        """Returns what ``choose`` makes of every rank's ``own``; each rank chooses by itself, and alike."""
        return choose(all_gather_json(own, self.control))


def _new_group(ranks: list[int] | None, backend: str | None = None, alone: bool = False) -> dist.ProcessGroup:
    """Makes a process group.

    Args:
        ranks: its members; None: all processes.
        backend: None: the default group's.
        alone: only the members call this, not the other processes.
    """
    return cast(dist.ProcessGroup, dist.new_group(ranks, GROUP_TIMEOUT, backend, use_local_synchronization=alone))
