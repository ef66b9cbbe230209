"""Runs the first steps of the trainer on every worker of gpipe-verify, and checks them on rank 0.

Rank 0 checks a step while the workers wait, so that only one step has to be kept.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..checkpoint.files import checkpoints_directory
from ..comparison.at_start import is_traced
from ..config import Settings
from ..disk import write_whole
from ..distributed.world import World
from ..errors import ConfigurationError
from ..factory.build import build_task
from ..launch.context import Context
from ..metrics.journal import Notices
from ..micro_batch import MicroBatch
from ..schedule.instruction import Op
from ..trainer.assembly import Assembly, assemble_model, start_worker
from ..trainer.batches import training_batches, wait_for_all
from ..trainer.run import assemble_training, compare_module
from .check import Checker
from .compare import Found, agrees, findings, report_of
from .record import RunWatch, Spill


def main(context: Context, config: dict[str, Any]) -> dict[str, Any] | None:
    """Runs one worker of gpipe-verify; rank 0 writes verify.json.

    Returns:
        On rank 0 the report (`report_of`); None elsewhere.

    Raises:
        ConfigurationError: this configuration cannot be verified, or is wrong in a way that shows only now.
        LayerFailed: a layer raised an exception.
    """
    settings = Settings.from_config(config["settings"])
    refuse_what_cannot_be_verified(settings)
    world = start_worker(context, settings)
    if settings.pipeline.compile:
        torch._inductor.config.fallback_random = True  # compiled layers then draw what they would draw uncompiled
    with in_chosen_type(settings) as chosen:
        report = Verification(context, config, chosen, world).run()
    if report is not None:
        write_whole(context.run_dir / "verify.json", json.dumps(report, indent=1) + "\n")
    return report


class Verification:
    """Runs and checks the first steps of one configuration; every worker has one.

    Args:
        context: place of the worker, and its connection to the command.
        config: plain values that the worker was started with.
        settings: configuration of the run, perhaps in float64.
        world: the worker's place among the others.
    """

    def __init__(self, context: Context, config: Mapping[str, Any], settings: Settings, world: World) -> None:
        self._world, self._settings, self._run_dir = world, settings, context.run_dir
        self._spill = Spill(context.run_dir / "verify")
        task, notices = build_task(settings.task, settings.seed), Notices(context.emit, world.rank == 0)
        self._assembly = assemble_model(context, settings, world, task, notices)
        if is_traced(self._assembly.builders):
            compare_module(self._assembly, notices)
        quiet = Notices(context.emit, active=False)
        self._trainer = assemble_training(context, config, self._assembly, quiet, None)
        self._watch = RunWatch(self._assembly, self._trainer, self._spill)
        self._checker = Checker(self._assembly, self._spill) if world.rank == 0 else None
        self._compared: dict[int, Found] = {}
        self._notes: list[str] = []

    def run(self) -> dict[str, Any] | None:
        """Runs all steps; returns the report on rank 0."""
        try:
            self._run_steps()
            wait_for_all(self._world)  # not after an error: the others may never arrive
        finally:
            if self._world.rank == 0:
                self._spill.drop("")
                shutil.rmtree(checkpoints_directory(self._run_dir), ignore_errors=True)
        checker = self._checker
        if checker is None:
            return None
        found = findings(self._compared, checker.places, checker.model.batchnorms)
        loss = math.nan if self._watch.result is None else self._watch.result.loss
        return report_of(self._settings, checker.tolerance, self._compared, found, self._notes, loss)

    def _run_steps(self) -> None:
        """Runs and checks steps until one differs or the data end."""
        batches = _mini_batches(self._assembly) if self._world.rank == 0 else iter(())
        taken = self._trainer.steps()
        self._watch.hold(0)
        for number in range(1, self._settings.verify.steps + 1):
            next(taken, None)
            if self._trainer.progress.step < number:  # the data has ended
                return
            if not self._check(number, next(batches, None)):
                return

    def _check(self, number: int, batch: list[list[MicroBatch]] | None) -> bool:
        """Checks a step on rank 0 while the other workers wait; returns on every worker whether both sides agree."""
        result, checker = self._watch.result, self._checker
        wait_for_all(self._world)
        seen = [sight for of_rank in self._world.gather(self._watch.take_seen()) for sight in of_rank]
        if checker is not None and result is not None:
            if batch is None:
                raise ConfigurationError(f"the data source gave fewer mini-batches when read again: {number - 1}")
            order = _backward_order(self._assembly, len(batch[0]))
            ordered = {(r, m): replica[m] for r, replica in enumerate(batch) for m in order}
            found = checker.step(number, result, seen, ordered)
            self._compared[number] = {quantity.name: quantity for quantity in found if quantity.compared}
            sizes = [len(inputs[0]) for inputs, _ in ordered.values()]
            if number == 1 and checker.model.batchnorms and len(sizes) > 1:
                said = f"BatchNorm normalises over at most {max(sizes)} examples, with M=1 over all {sum(sizes)}"
                self._notes.append(f"{said}: another M gives another loss (paper, section 2.2), and that is no error")
        return bool(self._world.broadcast(lambda: agrees(self._compared[number])))


def _mini_batches(assembly: Assembly) -> Iterator[list[list[MicroBatch]]]:
    """Reads the data once more: yields the micro-batches of every replica, mini-batch by mini-batch."""
    source, replicas = assembly.source, assembly.world.replicas
    assert source is not None
    M = assembly.settings.pipeline.M
    streams = [training_batches(source, None, M, replica, replicas) for replica in range(replicas)]
    for batches in zip(*streams, strict=False):
        yield [list(batch.micro_batches) for batch in batches]


def _backward_order(assembly: Assembly, micro_batches: int) -> list[int]:
    """Returns the micro-batches in the order in which the last cell adds up their gradients."""
    last = len(assembly.pipeline.cut.placement) - 1
    instructions = assembly.pipeline.schedule.lists(micro_batches)[assembly.pipeline.cut.placement[last]]
    adds = (Op.BACKWARD, Op.WEIGHT_GRADIENT)
    return [i.micro_batch for i in instructions if i.op in adds and i.cell == last]


# -- settings ----------------------------------------------------------------------------------------------------------


def refuse_what_cannot_be_verified(settings: Settings) -> None:
    """Refuses settings that have no plain counterpart, before anything is built.

    Raises:
        ConfigurationError: the run resumes, or its replicas share the statistics of BatchNorm.
    """
    if settings.checkpoint.resume is not None:
        raise ConfigurationError("gpipe-verify begins at the first step: leave out checkpoint.resume, or use init_from")
    if settings.pipeline.sync_batchnorm and settings.pipeline.replicas > 1:
        message = "gpipe-verify has no plain counterpart of pipeline.sync_batchnorm=true with several replicas"
        raise ConfigurationError(f"{message}: leave it out to verify everything else")


@contextmanager
def in_chosen_type(settings: Settings) -> Iterator[Settings]:
    """Yields settings with which layers and data come in `verify.dtype`, within the context.

    In float64 there is no autocast, boundaries are still cast, to float64, and the loss is still scaled.
    """
    if settings.verify.dtype == "configured":
        yield settings
        return
    wide: Any = "float64"  # users cannot choose this one, so the field's type does not list it
    boundaries = None if settings.precision.boundaries is None else wide
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield replace(
            settings,
            precision=replace(settings.precision, autocast=None, boundaries=boundaries, tf32=False),
        )
    finally:
        torch.set_default_dtype(usual)
