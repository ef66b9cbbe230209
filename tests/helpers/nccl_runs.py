"""Runs two training steps of several ranks, each a thread with pipeline and `Updater`, and records their calls.

torch.distributed is replaced by queues between the threads; what NCCL would be asked for becomes a `Call` of
`nccl_rules.py`. Messages carry their content; collectives carry none, so the numbers of tied weights are not real.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from composed import checked
from nccl_rules import Call
from torch import Tensor, nn

from gpipe_cli.config import ROUND_ROBIN, PipelineConfig
from gpipe_cli.distributed.pipeline import WorkerPipeline
from gpipe_cli.distributed.step_message import BatchShape
from gpipe_cli.distributed.world import World
from gpipe_cli.layers import LayerBuilder, Owner
from gpipe_cli.partition.cut import Cut
from gpipe_cli.pipeline.messages.transport import Transport
from gpipe_cli.pipeline.step import StepPlan
from gpipe_cli.position import Position
from gpipe_cli.schedule.instruction import COMPUTE, Op
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.schedule import REMAT
from gpipe_cli.tasks.own_loss import LossFunctionTask
from gpipe_cli.trainer.update import Updater

CPU = torch.device("cpu")
CONFIG = checked("debug=tiny").settings.pipeline
HOSTS = "hosts"  # the group for CPU tensors
HERE = threading.local()  # of each thread: its rank, its calls, and how many of each name there were
SHARED = ("0.weight", "0.bias")  # of a layer, by number of the tie


@dataclass(frozen=True)
class Group:
    """Has what is asked of a process group."""

    name: str
    ranks: tuple[int, ...]

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(HERE.rank)


@dataclass(frozen=True)
class Begun:
    """Waits for what has begun, as work of torch.distributed."""

    finish: Callable[[], object] = lambda: None

    def wait(self, timeout: object = None) -> None:
        self.finish()

    def is_completed(self) -> bool:
        return False


class Network:
    """Has the functions of torch.distributed that a training step uses."""

    def __init__(self) -> None:
        self._queues: dict[object, SimpleQueue[Tensor]] = {}

    def get_rank(self) -> int:
        return int(HERE.rank)

    def get_backend(self, group: Group) -> str:
        return "no NCCL, which has no tensors of the CPU"

    def isend(self, tensor: Tensor, dst: int = 0, group: Any = None, tag: int = 0, group_dst: int = 0) -> Begun:
        name, way, queue = self._message(HERE.rank, dst or group_dst, group, tag)
        HERE.calls.append(Call("tell", name, way[1:]) if group.name == HOSTS else _transfer("send", name, way, group))
        queue.put(tensor.clone())
        return Begun()

    def irecv(self, tensor: Tensor, src: int = 0, group: Any = None, tag: int = 0, group_src: int = 0) -> Begun:
        name, way, queue = self._message(src or group_src, HERE.rank, group, tag)
        if group.name != HOSTS:
            HERE.calls.append(_transfer("receive", name, way, group))
        heard = [Call("hear", name, way[:1])] if group.name == HOSTS else []
        return Begun(lambda: (HERE.calls.extend(heard), tensor.copy_(queue.get(timeout=20))))

    def send(self, tensor: Tensor, dst: int, group: Group, tag: int = 0) -> None:
        self.isend(tensor, dst, group, tag).wait()

    def recv(self, tensor: Tensor, src: int, group: Group, tag: int = 0) -> None:
        self.irecv(tensor, src, group, tag).wait()

    def _collective(self, *tensors: Tensor, group: Group, async_op: bool = False) -> Begun:
        HERE.calls.append(Call("collective", _numbered(group.name), group.ranks, group.name))
        return Begun()

    all_reduce = all_to_all_single = all_gather_into_tensor = _collective

    def _message(
        self, sender: int, receiver: int, group: Group, tag: int
    ) -> tuple[tuple[object, ...], tuple[int, int], SimpleQueue[Tensor]]:
        name = _numbered(group.name, sender, receiver, tag)
        return name, (sender, receiver), self._queues.setdefault(name, SimpleQueue())


def _numbered(*name: object) -> tuple[object, ...]:
    """Returns the name with its number among the equal ones of this rank."""
    HERE.counts[name] += 1
    return *name, HERE.counts[name]


def _transfer(kind: str, name: tuple[object, ...], way: tuple[int, int], group: Group) -> Call:
    return Call(kind, name, (min(way), max(way)), group.name)


class Watched(Position):
    """Records the computations among the engine's instructions."""

    def enter(self, cell: int | None, micro_batch: int | None, instruction: str | None) -> None:
        if Op.__members__.get((instruction or "").upper()) in COMPUTE:
            HERE.calls.append(Call("compute", (instruction, cell, micro_batch)))


def connected_like_nccl(ranks: tuple[int, ...], *arguments: Any) -> Transport:
    """Makes a transport as between GPUs."""
    transport = Transport(ranks, *arguments)
    transport.blocks_device, transport._window = True, None
    transport.exchange_first_messages()
    HERE.calls.append(Call("read", "connections"))
    return transport


@dataclass(frozen=True)
class Run:
    """Describes a run of D replicas of W workers.

    Attributes:
        ties: the cells of each tied weight's uses.
        bucket: bytes of gradients that are summed at once.
    """

    kind: str
    placement: tuple[int, ...]
    M: int
    remat: str
    keep: int | None = None
    replicas: int = 1
    ties: tuple[tuple[int, ...], ...] = ()
    bucket: int = 1 << 20

    def calls(self) -> list[list[Call]]:
        """Returns the calls of every rank, from the first connections to the last exchange."""
        shape: Any = {"K": len(self.placement), "M": self.M, "schedule": self.kind}
        config = replace(CONFIG, remat=self.remat, keep=self.keep, **shape)
        ranks = range((max(self.placement) + 1) * self.replicas)
        calls: list[list[Call]] = [[] for _ in ranks]
        network, pipeline = Network(), "gpipe_cli.distributed.pipeline"
        names = [name for name in vars(Network) if not name.startswith("_")]
        with (
            patch.multiple(dist, **{name: getattr(network, name) for name in names}),
            patch(f"{pipeline}.Transport", connected_like_nccl),
            patch("gpipe_cli.pipeline.messages.transport._FIRST_MESSAGES", (1, 2)),  # quicker than megabytes
            patch("gpipe_cli.pipeline.gradients.BUCKET_BYTES", self.bucket),
            ThreadPoolExecutor(len(ranks)) as threads,
        ):
            list(threads.map(self._work, ranks, calls, [config] * len(ranks)))  # raises what a thread raises
        return calls

    def _work(self, rank: int, calls: list[Call], config: PipelineConfig) -> None:
        HERE.rank, HERE.calls, HERE.counts = rank, calls, Counter()
        pipeline = self._pipeline(self._world(rank), config)
        optimizer = torch.optim.SGD(pipeline.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        updater = Updater(pipeline, optimizer, schedule, None, None)
        result: Any = SimpleNamespace(finite=True, gradient_norm=1.0)
        given = [((torch.ones(1, 2),), (torch.ones(1, 2),))] * self.M if pipeline.world.reads_data else None
        pipeline.ties.spread()
        pipeline.message.run()
        for step in range(2):
            plan = StepPlan(((),) * self.M, 1.0, step=step, micro_batches=given)
            pipeline.train_step(plan, cell_ended=updater.begin_sums)
            updater.reduce_gradients()
            updater.squared_norms()
            calls += [Call("compute", "norms"), Call("read", "norms")]
            pipeline.message.run()
            calls.append(Call("compute", "update"))
            updater.update(result, step)

    def _world(self, rank: int) -> World:
        W, D = max(self.placement) + 1, self.replicas
        everyone = tuple(range(W * D))
        hosts, *messages = (Group(name, everyone) for name in (HOSTS, *(f"messages {number}" for number in range(4))))
        replicas = Group("replicas", everyone[rank % W :: W]) if D > 1 else None
        groups: Any = hosts, tuple(messages), replicas
        return World(rank, W, D, CPU, CPU, *groups)

    def _pipeline(self, world: World, config: PipelineConfig) -> WorkerPipeline:
        K = len(self.placement)
        ties: list[dict[str, Owner]] = [{} for _ in range(K)]
        for name, (first, *others) in zip(SHARED, self.ties, strict=False):
            for cell in others:
                ties[cell][name] = Owner(f"layer_{first}", name)
        layers = [LayerBuilder(f"layer_{number}", layer) for number in range(K)]
        cut, task = Cut([1] * K, self.placement, [], 0, ties), LossFunctionTask(nn.functional.mse_loss)
        return WorkerPipeline(layers, cut, config, task, BatchShape((2,), (2,)), world, where=Watched())


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def drawn_run(seed: int) -> Run:
    draw = random.Random(seed)
    kind = draw.choice(list(KINDS))
    workers = draw.choice((2, 2, 3, 3, 4, 4, 5, 8, 16))
    rounds = draw.choice((1, 2, 3)) if kind in ROUND_ROBIN and workers <= 5 else 1
    cells = range(workers * rounds)
    ties = (draw.sample(cells, k=2 + draw.randrange(2) * (len(cells) > 2)) for _ in range(draw.choice((0, 0, 1, 2))))
    M = draw.choice((1, 2, 3, 4, 5, 7, 8) if draw.random() < 0.95 else (16, 33, 64))
    return Run(
        kind=kind,
        placement=tuple(range(workers)) * rounds,
        M=M,
        remat=draw.choice(REMAT),
        keep=draw.choice((None, None, draw.randint(0, M))),
        replicas=draw.choice((1, 1, 2, 3)) if workers < 5 else 1,
        ties=tuple(tuple(sorted(tie)) for tie in ties),
        bucket=draw.choice((1, 1 << 20)),
    )
