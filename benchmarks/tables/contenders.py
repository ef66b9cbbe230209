"""Counts the paper's models, and runs a workload by the engine and by torch.distributed.pipelining."""

from collections.abc import Sequence
from functools import cache, partial
from math import prod
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from gpipe_cli.launch.context import Context
from gpipe_cli.launch.messenger import LOCAL
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.partition.cost import count_forward
from gpipe_cli.partition.partition import cell_layers
from gpipe_cli.partition.survey import survey

from .emulated import Link, Workload, join_emulation, warm_up
from .steps import CPU, Step, engine_step, make_cell, squared_loss
from .throughput import TORCH, ModelCosts
from .timing import StopWatch, take_turns

SCHEDULES: dict[str, Any] = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
OF_SEVERAL_STAGES: dict[str, Any] = {"zbv": pipelining.ScheduleZBVZeroBubble}
OF_SEVERAL_STAGES |= dict.fromkeys(("interleaved", "interleaved_1f1b"), pipelining.ScheduleInterleaved1F1B)
OF_SEVERAL_STAGES |= {"zero_bubble": pipelining.ScheduleInterleavedZeroBubble}
HALVES = ("zero_bubble", "zbv")
TOKENS, VOCABULARY, IMAGE, CLASSES = 1024, 32000, 224, 1000


def count_model(family: str, sizes: tuple[int, ...]) -> ModelCosts:
    """Counts FLOPs of a model's layers and bytes behind them for one example, on fake tensors."""
    if family == "amoebanet":
        L, D = sizes
        inputs, builders = torch.randn(1, 3, IMAGE, IMAGE), amoebanet(L, D, CLASSES, IMAGE, auxiliary_head=False)
    else:
        (L,), inputs = sizes, torch.zeros(1, TOKENS, dtype=torch.int64)
        builders = transformer_lm(L, 8192, 32, VOCABULARY)
    layers = survey(builders, (inputs,), count_forward).layers
    behind = [sum(prod(t.shape) * t.dtype.itemsize for t in layer.outputs) for layer in layers]
    return ModelCosts(family, sizes, [layer.cost for layer in layers], behind)


def worker(context: Context, config: dict[str, Any]) -> list[dict[str, float | None]]:
    """Returns for each setting the median seconds of each contender's steps, None where it refuses the setting.

    Args:
        config: ``repetitions``, ``realtime`` and ``settings`` (`Setting.config`).
    """
    watch = join_emulation(context, config["realtime"])
    return [measure(setting, context, config["repetitions"], watch) for setting in config["settings"]]


def measure(setting: dict[str, Any], context: Context, repetitions: int, watch: StopWatch) -> dict[str, float | None]:
    """Lets the contenders of one setting take turns."""
    link = None if setting["link"] is None else Link(**setting["link"])
    work = Workload(setting["seconds"], setting["M"], context.rank, context.world_size, link)
    steps = {name: contender(name, *facts, work=work) for name, facts in setting["contenders"].items()}
    running = {name: step for name, step in steps.items() if step is not None}
    warm_up(running.values(), watch)
    seconds = take_turns({name: partial(watch.time, step) for name, step in running.items()}, repetitions)
    return {name: median(seconds[name]) if name in seconds else None for name in steps}


def contender(name: str, kind: str, cut: Sequence[int], policy: Any, *, work: Workload) -> Step | None:
    """Builds the step of one contender on this worker; None, on all workers, where it refuses the workload.

    Args:
        name: begins with "torch " for torch.distributed.pipelining.
        kind: the kind of schedule.
        cut: number of layers of each cell.
        policy: graphs that are kept, as `kept_graphs` takes them.
    """
    parts = cell_layers(cut)
    if name.startswith(TORCH):
        return torch_step(kind, parts, policy, work)
    placement = tuple(cell % work.K for cell in range(len(cut)))
    mine = [cell for cell, worker in enumerate(placement) if worker == work.rank]
    cells = [make_cell(cell, work.layers(parts[cell], kind == "zero_bubble"), parts[cell].start) for cell in mine]
    return engine_step(cells, placement, work.rank, work.transport(placement), work.micro_batches, kind, policy)


class _Checkpointed(nn.Sequential):
    """Recomputes by torch.utils.checkpoint, the way of torch's pipelining: begun when the gradient has arrived."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


@cache
def peer_group() -> dist.ProcessGroup | None:
    """Returns the group for torch's pipelining: gloo where the job has a group of ours, which it cannot use."""
    ours = dist.is_initialized() and dist.get_backend() == LOCAL
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if ours else None


def torch_step(kind: str, parts: Sequence[range], policy: str, work: Workload) -> Step | None:
    """Builds the step of torch.distributed.pipelining on this worker.

    Returns:
        None where torch refuses: 1f1b with M < K, the schedules of several stages an M that is no multiple of K,
        micro-batches of different sizes; or where it would recompute in both halves of a backward.
    """
    M, rank, cells = work.M, work.rank, len(parts)
    x = torch.cat([inputs for (inputs,), _ in work.micro_batches])
    refused = M % work.K if kind in OF_SEVERAL_STAGES else kind == "1f1b" and work.K > M
    if refused or len(x) % M or (kind in HALVES and policy != "never"):
        return None
    mine = [rank, cells - 1 - rank] if kind == "zbv" else [*range(rank, cells, work.K)]  # ZBV: in a V
    make = nn.Sequential if policy == "never" else _Checkpointed
    modules = [make(*work.layers(parts[cell], kind in HALVES)) for cell in mine]
    stages = [
        pipelining.PipelineStage(m, cell, cells, CPU, group=peer_group()) for m, cell in zip(modules, mine, strict=True)
    ]

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return squared_loss((y,), (target,))[0]

    several = OF_SEVERAL_STAGES.get(kind)
    make_schedule: Any = several or SCHEDULES[kind]
    schedule = make_schedule(stages if several else stages[0], M, loss, scale_grads=False)
    first, last = [x] * (rank == 0), x if cells - 1 in mine else None
    return lambda: schedule.step(*first, target=last, return_outputs=False)
