"""Defines `World`: this process's rank, replica, device and process groups."""

import os
import socket
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ..errors import ConfigurationError
from ..gpus import GPU, count_gpus
from ..launch.context import GROUP_TIMEOUT_SECONDS, Context
from ..launch.join import adopt_step, check_rank, local_rank
from ..launch.messenger import LOCAL
from .exchange import all_gather_json, broadcast_json, gather_json

NCCL2 = "ProcessGroupNCCL2"
CPU = "cpu"  # the identity of a device that is not a GPU
GROUP_TIMEOUT = timedelta(seconds=GROUP_TIMEOUT_SECONDS)  # torch gives NCCL ten minutes: too few while a peer compiles
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class World:
    """Holds this process's rank, replica, device and process groups.

    Ranks are numbered replica by replica: rank = replica · workers + worker.

    Attributes:
        workers, replicas: W and D; together W·D ranks.
        device: this worker's device.
        wire: the device whose tensors are sent between workers: `device` with NCCL, else the CPU.
        all_ranks: group of all ranks for CPU tensors; None when there is only one rank.
        message_groups: groups for activations and for gradients; with NCCL two of each, see `Transport`.
        replica_group: the ranks that hold the same layers, one of each replica; None without replicas.
        members: the ranks of all in torch's default group; empty: the same.
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
        return self.workers * self.replicas

    @property
    def replica(self) -> int:
        return self.rank // self.workers

    @property
    def worker(self) -> int:
        return self.rank % self.workers

    @property
    def reads_data(self) -> bool:
        """Returns whether this is the first worker of a replica; targets travel with their micro-batch."""
        return self.worker == 0

    def rank_of(self, worker: int) -> int:
        """Returns the rank of a worker of this replica, in torch's default group."""
        rank = self.replica * self.workers + worker
        return self.members[rank] if self.members else rank

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Calls ``make`` on rank 0 and returns its result on every rank, as JSON keeps it."""
        return broadcast_json(make() if self.rank == 0 else None, self.all_ranks)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns every rank's ``value``, in rank order, on every rank, as JSON keeps it."""
        return all_gather_json(value, self.all_ranks)

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's ``value``, in rank order, on rank 0, and an empty list elsewhere, as JSON keeps it."""
        return gather_json(value, self.all_ranks)

    def gather_from_workers(self, values: Iterable[Any]) -> list[Any]:
        """Returns the values of all workers of replica 0, one worker's after another's, on every rank, as JSON."""
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
    """Joins the processes that torchrun or srun has started, as workers of replicas; without one there is one process.

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
        """Makes a group of its own: messages of other pipelines, and the program's, are not taken for this one's."""
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
        made: workers whose group this rank takes part in making.
    """
    if replicas == 1:
        return None
    return {worker: new_group(range(worker, replicas * workers, workers)) for worker in made}[rank % workers]


def _divided(size: int, replicas: int) -> int:
    """Returns the workers of each replica.

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
        return choose(all_gather_json(own, self.control))


def _new_group(ranks: list[int] | None, backend: str | None = None, alone: bool = False) -> dist.ProcessGroup:
    """Makes a group; ``alone``: its members do, without the other processes."""
    return cast(dist.ProcessGroup, dist.new_group(ranks, GROUP_TIMEOUT, backend, use_local_synchronization=alone))


def nccl_kind() -> str:
    """Returns the class of torch that backend="nccl" makes: before 2.15 TORCH_DIST_USE_NCCL2=1 chooses the newer one.

    A group of `NCCL2` has a GPU from the start and guesses which unless it is told. A group of the older class that is
    told puts all its messages into one queue.
    """
    if register := getattr(dist.Backend, "_ensure_backend_registered", None):  # torch 2.14
        register("nccl")
    made_by = dist.Backend._plugins.get("NCCL")
    return NCCL2 if made_by and "nccl2" in made_by.creator_fn.__name__ else "ProcessGroupNCCL"


def choose_device(context: Context, device: str) -> torch.device:
    """Returns the device of this rank.

    ``auto`` means the CPU only where there is no GPU: an old driver must not move a long run to the CPU silently.

    Raises:
        ConfigurationError: cuda is requested, or a GPU is present, but torch cannot compute on it.
    """
    if device == "cpu":
        return torch.device("cpu")
    made_for = f"made for CUDA {torch.version.cuda}" if torch.version.cuda else "made for CPUs only"
    if torch.cuda.is_available():
        chosen = torch.device(GPU, context.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
        try:
            compute_on(chosen)
        except RuntimeError as error:
            raise ConfigurationError(
                f"pipeline.device={device}: torch {torch.__version__} ({made_for}) cannot compute on the "
                f"{torch.cuda.get_device_name(chosen)} of {socket.gethostname()}: {str(error).splitlines()[0]}; "
                "install a torch that has kernels for it, end what else uses it, or use pipeline.device=cpu"
            ) from error
        return chosen
    if device == "cuda" or count_gpus():
        raise ConfigurationError(
            f"pipeline.device={device}: torch {torch.__version__} ({made_for}) can use none of the {count_gpus()} GPUs "
            f"that are present on {socket.gethostname()}: check nvidia-smi and CUDA_VISIBLE_DEVICES, update the NVIDIA "
            "driver or install a torch that fits it; to compute on CPUs use pipeline.device=cpu"
        )
    return torch.device("cpu")


def compute_on(device: torch.device) -> None:
    """Runs a kernel: a RuntimeError here would later be taken for a layer's."""
    torch.ones(1, device=device).add_(1).item()


def choose_backend(context: Context, identity: str, backend: str) -> str:
    """Returns gloo or nccl: the same on every rank, because rank 0 counts the devices of all ranks.

    Args:
        identity: identity of this rank's device, see `device_identity`.

    Raises:
        ConfigurationError: `pipeline.backend=nccl` without a GPU for each worker.
    """
    if context.world_size == 1:  # no messages
        return "nccl" if identity != CPU and backend != "gloo" else "gloo"
    if backend == "gloo":
        return backend
    gpus = int(context.decide("devices", identity, lambda devices: str(len({*devices} - {CPU}))))
    if gpus == context.world_size:
        return "nccl"
    found = f"{context.world_size} workers have {gpus} GPUs"
    if backend == "nccl":
        raise ConfigurationError(
            f"pipeline.backend=nccl needs a GPU of its own for every worker, but {found}: use pipeline.backend=auto, "
            "or as many workers on each machine as it has GPUs"
        )
    if context.rank == 0 and gpus:
        text = f"messages go through the CPU, slower than from GPU to GPU: {found}"
        context.emit({"kind": "warning", "text": text})
    return "gloo"


def device_identity(device: torch.device) -> str:
    """Returns a text that no other device of the job has.

    For a GPU: its machine and PCI address, by which NCCL distinguishes GPUs. Slices of one GPU (MIG) have different
    uuids, but NCCL refuses them as one GPU.
    """
    if device.type == "cpu":
        return CPU
    properties: Any = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return f"{machine_id()} {properties.uuid if None in place else ':'.join(map(str, place))}"


def machine_id() -> str:
    """Returns the machine's boot id, equal in all its containers; the host name where the system has no boot id.

    Processes of equal id share the monotonic clock.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
