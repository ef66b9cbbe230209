"""Runs some steps of the trainer on every worker of gpipe-verify, then on rank 0 the same steps without it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import torch._dynamo  # every optimizer made imports it; here it is imported once, before workers are forked
import torch.distributed as dist

from ..config import Settings
from ..distributed.world import World
from ..factory.build import build_model, build_task
from ..launch.context import Context
from ..metrics.journal import Notices
from ..micro_batch import MicroBatch
from ..schedule.instruction import Op
from ..trainer.assembly import Assembly, assemble_model, start_worker
from ..trainer.batches import training_batches
from ..trainer.training import assemble_training
from .batchnorm import BatchNormNote, batchnorm_note
from .compare import compare, compare_beginnings, gradients_agree
from .diagnose import ComparedStep, VerifiedRun, diagnose
from .plain import PlainTraining, Together
from .record import StepState
from .report import VerifyReport
from .settings import in_wanted_dtype, refuse_what_cannot_be_verified, require_memory, tolerance_of
from .watch import StepWatch


def main(context: Context, config: dict[str, Any]) -> dict[str, Any] | None:
    """Runs one worker.

    Returns:
        On rank 0 the report as plain values (`VerifyReport.as_json`); None elsewhere.

    Raises:
        ConfigurationError: this configuration cannot be verified, or is wrong in a way that shows only now.
        LayerFailed: a layer raised an exception.
    """
    settings = Settings.from_config(config["settings"])
    refuse_what_cannot_be_verified(settings)
    settings = in_wanted_dtype(settings)
    world = start_worker(context, settings)
    if world.device.type == "cuda":
        choose_repeatable_kernels()
    journal = Notices(context.run_dir, context.emit, world.rank == 0)
    assembly = assemble_model(context, settings, world, build_task(settings.task), journal)
    parameters, bytes_each = assembly.layout.cut.parameters, 8 if settings.verify.dtype == "float64" else 4
    world.broadcast(lambda: require_memory(parameters, bytes_each))
    watch = StepWatch(assemble_training(context, config, assembly, journal, None), assembly)
    start = watch.held()
    watch.run_steps(settings.verify.steps)
    begun, *steps = _gather(world, [start, *watch.states])
    if world.rank != 0:
        return None
    with suppress(OSError):  # made by the trainer's assembly, and empty: nothing is saved here
        (context.run_dir / "checkpoints").rmdir()
    report = compare_with_plain(assembly, begun, steps)
    (context.run_dir / "verify.json").write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    return report.as_json()


def choose_repeatable_kernels() -> None:
    """Makes both sides sum in the same order and in full precision: by default cuDNN rounds to 10 bits."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)


def compare_with_plain(assembly: Assembly, begun: StepState, steps: Sequence[StepState]) -> VerifyReport:
    """Runs the steps again without the engine, on rank 0, and compares.

    Where gradients agree within the tolerance, the plain optimizer uses the pipeline's: an optimizer such as Adam turns
    the rounding of a gradient near zero into a whole step, which is no error of the pipeline.

    Args:
        begun: weights and buffers of the pipeline before the first step.
        steps: the state after each step of the pipeline.
    """
    settings, replicas = assembly.settings, assembly.world.replicas
    tolerance, names = tolerance_of(settings), list(assembly.layout.layers)
    plain = PlainTraining(build_model(settings.model), settings, assembly.task, assembly.world.device)
    if settings.checkpoint.init_from is not None:
        plain.load(begun)
    together = Together.REPLICAS if settings.pipeline.sync_batchnorm and replicas > 1 else Together.NOTHING
    compared: list[ComparedStep] = []
    note: BatchNormNote | None = None
    whole: StepState | None = None
    for number, (ours, micro_batches) in enumerate(zip(steps, _mini_batches(assembly), strict=False)):
        before, order = plain.held(), backward_order(assembly, len(micro_batches[0]))
        if number == 0 and plain.batchnorms and sum(len(replica) for replica in micro_batches) > 1:
            whole = plain.gradients(number, micro_batches, order, Together.EVERYTHING)
            plain.load(before)
        theirs = plain.gradients(number, micro_batches, order, together)
        if number == 0 and whole is not None:
            note = batchnorm_note(plain.batchnorms, micro_batches, (ours, theirs, whole), tolerance, names)
        agree = gradients_agree(ours, theirs, tolerance)
        plain.update(theirs, ours.gradients if agree else theirs.gradients)
        found = compare(ours, theirs, before, tolerance, names)
        if number == 0:
            found = found.after(compare_beginnings(begun, before, tolerance))
        compared.append(ComparedStep(number + 1, ours, theirs, before, found))
    cells = [cell for cell, layers in enumerate(assembly.layout.cut.layers) for _ in layers]
    clip = settings.trainer.gradient_clip
    model = VerifiedRun(names, cells, frozenset(plain.draws_noise), settings.pipeline.M, replicas, clip)
    findings = diagnose(compared, model, tolerance)
    loss = steps[-1].loss if steps else math.nan
    return VerifyReport(settings, tolerance, [one.found for one in compared], findings, note, loss)


def _mini_batches(assembly: Assembly) -> Iterator[list[list[MicroBatch]]]:
    """Reads the data once more: yields the micro-batches of every replica, mini-batch by mini-batch."""
    source, replicas = assembly.source, assembly.world.replicas
    assert source is not None
    M = assembly.settings.pipeline.M
    streams = [training_batches(source, None, M, replica, replicas) for replica in range(replicas)]
    for batches in zip(*streams, strict=False):
        yield [list(batch.micro_batches) for batch in batches]


def backward_order(assembly: Assembly, micro_batches: int) -> list[int]:
    """Returns the order in which the schedule adds up the gradients of micro-batches, as in the last cell."""
    last = len(assembly.layout.cut.placement) - 1
    instructions = assembly.runtime.schedules.training_lists(micro_batches)[assembly.layout.cut.placement[last]]
    adds = (Op.BACKWARD, Op.WEIGHT_GRADIENT)
    return [i.micro_batch for i in instructions if i.op in adds and i.cell == last]


def _gather(world: World, mine: list[StepState]) -> list[StepState]:
    """Returns on rank 0 the whole model's states: tensors from the workers of replica 0, fingerprints from all."""
    if world.replica > 0:
        mine = [StepState(counted=state.counted, trace=state.trace) for state in mine]
    everyone: list[list[StepState]] = [mine]
    if world.all_ranks is not None:
        received: list[Any] | None = [None] * world.size if world.rank == 0 else None
        dist.gather_object(mine, received, dst=0, group=world.all_ranks)
        everyone = cast("list[list[StepState]]", received or [mine])
    whole = everyone[0]
    for other in everyone[1:]:
        for state, further in zip(whole, other, strict=True):
            state.take(further)
    return whole
