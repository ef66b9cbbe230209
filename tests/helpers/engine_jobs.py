"""Runs the engine over many settings, in this process or as one of several workers, and compares with a plain loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import small_models as small
import torch
import torch.distributed as dist
from group_jobs import CPU, joined, of_all
from schedule_rules import Policy, scheduled

from benchmarks.subject import mini_batch, small_model
from gpipe_cli.config import ROUND_ROBIN
from gpipe_cli.launch.context import Context
from gpipe_cli.pipeline.batchnorm import finish_batchnorm
from gpipe_cli.pipeline.cell import BuiltLayer
from gpipe_cli.pipeline.messages.shared_memory import SharedMemoryTransport
from gpipe_cli.pipeline.messages.transport import Transport
from gpipe_cli.pipeline.step import StepPlan
from gpipe_cli.schedule.early import post_early
from gpipe_cli.schedule.orders import KINDS
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
    varying: bool = False

    def layers(self) -> list[BuiltLayer]:
        model = small.varying_model() if self.varying else small_model(self.batchnorm, self.dropout)
        return small.build_all(model)


def all_cases(K: int) -> list[Case]:
    """Returns all schedules and policies, even and uneven batches, with and without BatchNorm, and varying ways."""
    models = ((8, False, 0.0), (8, True, 0.2), (11, False, 0.0), (11, True, 0.2), (11, False, 0.0, True))
    return [
        Case(K, M, kind, remat, *model)
        for M in (1, 3, 4)
        for kind in ("gpipe", "1f1b", "zero_bubble")
        for remat in REMAT
        for model in models
        if kind != "zero_bubble" or model in models[-2:]
    ]


def sizes_of(layers: Sequence[BuiltLayer], K: int) -> list[int]:
    return [len(part) for part in torch.arange(len(layers)).tensor_split(K)]


def run_case(case: Case, placement: Sequence[int], worker: int, transport: Transport | None) -> list[dict[str, Any]]:
    """Runs some steps of gradient descent; returns the losses, gradients and buffers of each, as far as held here."""
    layers = case.layers()
    engine = small.engine_of(layers, sizes_of(layers, case.K), placement=placement, transport=transport, worker=worker)
    cells = [*engine.cells.values()]
    lists = scheduled(case.kind, placement, case.M, case.remat)
    posts = post_early(lists)[worker] if transport is not None and transport.blocks_device else None
    seen = []
    for step in range(STEPS):
        micro_batches = mini_batch(step, case.examples, case.M)
        signatures = tuple(tuple(inputs[0].shape) for inputs, _ in micro_batches)
        mine, weight = micro_batches if placement[0] == worker else None, small.weight_of(micro_batches)
        plan = StepPlan(signatures, weight, step=step, steps=STEPS, micro_batches=mine)
        record = engine.train_step(lists[worker], plan, posts)
        finish_batchnorm([b for cell in cells for b in cell.batchnorms], None)
        if transport is not None:
            dist.barrier()  # in the trainer the exchange separates the steps
        seen.append(small.seen_after(cells, record))
        small.descend((parameter for cell in cells for _, parameter in cell.parameters()), 0.1)
    return seen


@cache
def run_plain(case: Case) -> list[dict[str, Any]]:
    """Runs the same steps without the engine; what only the engine is told may be left the same in all cases."""
    layers = case.layers()
    seen = []
    for step in range(STEPS):
        micro_batches = mini_batch(step, case.examples, case.M)
        loss = small.plain_step(layers, micro_batches, step)
        held = {f"{layer.name}.{name}": p for layer in layers for name, p in layer.module.named_parameters()}
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in held.items()}
        seen.append({"loss": loss, "gradients": gradients})
        small.descend(held.values(), 0.1)
    return seen


def compare(context: Context, config: dict[str, Any]) -> list[str]:
    """Entry point of one of two workers: returns what has other bits than in one process that keeps no graph."""
    world, found = joined(context), []
    groups, gloo = tuple(dist.new_group() for _ in range(4)), dist.new_group(backend="gloo")
    for kind in KINDS:
        placement = (0, 1, 0, 1) if kind in ROUND_ROBIN else (0, 0, 1, 1)
        settings = product((False, True), zip(WIRES, ("always", "never", (3, 1, 2, 0)), strict=True))
        alone = [run_case(Case(4, 5, kind, "always", 11, True, 0.2, v), (0,) * 4, 0, None) for v in (False, True)]
        for varying, (wire, policy) in settings:
            kind_of_wire = SharedMemoryTransport if wire == "shared memory" else Transport
            transport: Any = kind_of_wire(placement, CPU, CPU, groups, gloo if wire == "gloo" else world)
            if wire == "like NCCL":
                transport.exchange_first_messages()
                transport.blocks_device = True
            case = Case(4, 5, kind, policy, 11, True, 0.2, varying)
            seen = run_case(case, placement, context.rank, transport)
            ours = small.other_values(seen, alone[varying], ("losses", "gradients", "buffers"), (0, 0))
            found += [f"worker {context.rank}, {wire}, {case}: {text}" for text in ours]
    return of_all(found)
