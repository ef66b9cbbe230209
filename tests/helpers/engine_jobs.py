"""Runs the engine over many settings, in this process or as one of several workers, and compares with a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from schedule_rules import Policy, scheduled
from small_models import (
    CPU,
    build_all,
    descend,
    differences,
    mini_batch,
    other_bits,
    plain_step,
    seen_after,
    small_model,
    token_loss,
    weight_of,
)

from gpipe_cli.launch.context import Context
from gpipe_cli.partition.partition import cell_layers
from gpipe_cli.pipeline.batchnorm import finish_batchnorm
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.engine import Engine, StepInput
from gpipe_cli.pipeline.messages.process_group import ProcessGroupTransport
from gpipe_cli.pipeline.messages.transport import Transport, connect_workers
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.schedule.orders import KINDS, ROUND_ROBIN
from gpipe_cli.schedule.posting import post_when_sent
from gpipe_cli.schedule.schedule import REMAT

STEPS = 3
CLOSE = 1e-10, 1e-13  # relative, absolute
WIRES = ("shared memory", "gloo", "like NCCL")  # the last: groups, first messages and receives as between GPUs


@dataclass(frozen=True)
class Case:
    """Describes one setting of the engine."""

    K: int
    M: int
    kind: str
    remat: Policy
    examples: int = 8
    batchnorm: bool = False
    dropout: float = 0.0


def all_cases(K: int) -> list[Case]:
    """Returns all schedules and policies, even and uneven batches, with and without BatchNorm."""
    return [
        Case(K, M, kind, remat, examples, batchnorm, dropout)
        for M in (1, 3, 4)
        for kind in ("gpipe", "1f1b", "zero_bubble")
        for remat in REMAT
        for examples, batchnorm, dropout in ((8, False, 0.0), (8, True, 0.2), (11, False, 0.0), (11, True, 0.2))
        if kind != "zero_bubble" or (batchnorm and examples == 11)
    ]


def round_robin_cases(K: int) -> list[Case]:
    """Returns cases with several cells on each worker, and M below, at and above a multiple of W."""
    return [Case(K, M, "interleaved_1f1b", remat, 11, True, 0.2) for M in (1, 3, 4, 5) for remat in REMAT]


def sizes_of(K: int) -> list[int]:
    return [len(part) for part in torch.arange(7).tensor_split(K)]


def run_case(case: Case, placement: Sequence[int], worker: int, transport: Transport | None) -> list[dict[str, Any]]:
    """Runs some steps of gradient descent; returns the losses, gradients and buffers of each, as far as held here."""
    layers = build_all(small_model(case.batchnorm, case.dropout))
    noise = NoiseSource(1, 0, CPU)
    cells = [
        Cell(k, [layers[i] for i in numbers], noise)
        for k, numbers in enumerate(cell_layers(sizes_of(case.K)))
        if placement[k] == worker
    ]
    engine = Engine(cells, placement, transport, token_loss, 1, CPU)
    lists = scheduled(case.kind, placement, case.M, case.remat)
    posts = post_when_sent(lists)[worker] if transport is not None and transport.blocks_device else None
    seen = []
    for step in range(STEPS):
        micro_batches = mini_batch(step, case.examples, case.M)
        signatures = tuple(tuple(inputs[0].shape) for inputs, _ in micro_batches)
        step_input = StepInput(step, STEPS, signatures, 1 / weight_of(micro_batches))
        mine = micro_batches if placement[0] == worker else None
        record = engine.train_step(lists[worker], step_input, mine, posts)
        finish_batchnorm([b for cell in cells for b in cell.batchnorms], None)
        if transport is not None:
            dist.barrier()  # in the trainer the exchange separates the steps
        seen.append(seen_after(cells, record))
        descend((parameter for cell in cells for _, parameter in cell.parameters()), 0.1)
    return seen


def run_plain(case: Case) -> list[dict[str, Any]]:
    """Runs the same steps without the engine."""
    layers = build_all(small_model(case.batchnorm, case.dropout))
    seen = []
    for step in range(STEPS):
        micro_batches = mini_batch(step, case.examples, case.M)
        loss = plain_step(layers, micro_batches, step)
        held = {f"{layer.name}.{name}": p for layer in layers for name, p in layer.module.named_parameters()}
        gradients = {name: p.grad.clone() for name, p in held.items() if p.grad is not None}
        seen.append({"loss": loss, "gradients": gradients})
        descend(held.values(), 0.1)
    return seen


def compare_as_processes(context: Context, config: dict[str, Any]) -> list[str]:
    """Entry point of a worker: cell k on worker k, or two cells a worker, round robin, where the layers suffice."""
    torch.set_default_dtype(torch.float64)
    context.init_process_group()
    workers = context.world_size
    world = dist.group.WORLD
    assert world is not None
    each_way, gloo = tuple(dist.new_group() for _ in range(4)), dist.new_group(backend="gloo")
    found: list[str] = []
    for case in all_cases(workers) + (round_robin_cases(2 * workers) if workers < 4 else []):
        placement = tuple(cell % workers for cell in range(case.K))
        wire = WIRES[(case.examples + case.M + case.batchnorm + len(str(case.remat))) % len(WIRES)]
        like_nccl = wire == "like NCCL"
        groups = each_way if like_nccl or case.kind == "interleaved_1f1b" else (world, world)
        transport: Transport
        if like_nccl:
            transport = ProcessGroupTransport(placement, CPU, CPU, groups, world)
            transport.exchange_first_messages()
            transport.blocks_device = True
        else:
            transport = connect_workers(placement, CPU, CPU, groups, world if wire == "shared memory" else gloo)
        ours = run_case(case, placement, context.rank, transport)
        found += differences(case, ours, run_plain(case), *CLOSE)
        losses: list[Any] = [None] * workers
        dist.all_gather_object(losses, [step["losses"] for step in ours])
        in_one_process = run_case(case, (0,) * case.K, 0, None)
        different = other_bits(ours, in_one_process, ["gradients"])
        found += [f"{case}, {text} have other bits than in one process" for text in different]
        for step, alone in enumerate(in_one_process):
            together: dict[Any, float] = {}
            for worker in losses:
                together |= worker[step]
            if together != alone["losses"]:
                found.append(f"{case}, step {step}: losses differ from those of one process")
    everyone: list[Any] = [None] * workers
    dist.all_gather_object(everyone, found)
    return [text for worker in everyone for text in worker]


def compare_kept(context: Context, config: dict[str, Any]) -> list[str]:
    """Entry point of one of two workers: returns what has other bits with numbers of kept graphs than with none."""
    context.init_process_group()
    world = dist.group.WORLD
    assert world is not None
    groups, found = tuple(dist.new_group() for _ in range(4)), []
    for kind in KINDS:
        placement = (0, 1, 0, 1) if kind in ROUND_ROBIN else (0, 0, 1, 1)
        seen = []
        for policy in ("always", (3, 1, 2, 0)):
            transport = connect_workers(placement, CPU, CPU, groups, world)
            seen.append(run_case(Case(4, 5, kind, policy, 11, True, 0.2), placement, context.rank, transport))
        found += [f"worker {context.rank}, {kind}, {text}" for text in other_bits(seen[1], seen[0])]
    everyone: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyone, found)
    return [text for worker in everyone for text in worker]
