"""Runs steps of the trainer on every worker of gpipe-verify, and checks them on rank 0.

The first steps are checked, then one with a loss that is not finite, then one after a checkpoint and a resume. Rank 0
checks a step while the workers wait, so that only one step has to be kept.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch._dynamo  # every optimizer made imports it; here it is imported once, before workers are forked
from torch import Tensor

from ..checkpoint.files import checkpoints_directory, latest
from ..comparison.at_start import ModuleReport, compare_with_module, given_by, is_traced, key_of
from ..comparison.difference import Quantity
from ..config import Settings
from ..data.source import Source, no_report
from ..disk import write_whole
from ..distributed.world import World
from ..errors import ConfigurationError
from ..factory.build import build_model, build_source, build_task
from ..factory.example import asks_for_example, with_example
from ..launch.context import Context
from ..metrics.journal import Notices
from ..micro_batch import MicroBatch
from ..pipeline.engine import Engine
from ..pipeline.meter import peak_memory
from ..schedule.instruction import Op
from ..trainer.assembly import Assembly, assemble_model, start_worker
from ..trainer.batches import evaluation_batches, training_batches, wait_for_all
from ..trainer.loop import Trainer
from ..trainer.training_assembly import assemble_training
from . import compare as c
from .check import Checker
from .compare import VerifyReport, findings
from .plain import MiniBatch, PlainModel
from .record import RecordedStep, RunWatch, Spill
from .settings import in_float64, refuse_what_cannot_be_verified, tolerance_of


def main(context: Context, config: dict[str, Any]) -> dict[str, Any] | None:
    """Runs one worker.

    Where float32 differs by no more than rounding may grow to, float64 decides.

    Returns:
        On rank 0 the report as plain values (`VerifyReport.as_json`); None elsewhere.

    Raises:
        ConfigurationError: this configuration cannot be verified, or is wrong in a way that shows only now.
        LayerFailed: a layer raised an exception.
    """
    settings = Settings.from_config(config["settings"])
    refuse_what_cannot_be_verified(settings)
    world = start_worker(context, settings)
    if settings.pipeline.compile:
        torch._inductor.config.fallback_random = True  # the random numbers of layers that are not compiled
    wide = settings.verify.dtype == "float64"
    report = Verification(context, config, in_float64(settings) if wide else settings, world).run()
    if not wide and world.broadcast(lambda: report is not None and report.may_be_rounding):
        decided = Verification(context, config, in_float64(settings), world).run()
        report = None if report is None or decided is None else report.decided_by(decided)
    itself = compare_module(settings) if report is not None else None
    wait_for_all(world)
    if report is None:
        return None
    report = dataclasses.replace(report, itself=itself)
    write_whole(context.run_dir / "verify.json", json.dumps(report.as_json(), indent=1) + "\n")
    return report.as_json()


def compare_module(settings: Settings) -> ModuleReport | None:
    """Compares the layers of a traced module with the module itself, whatever `verify.dtype`; None for other models."""
    if not asks_for_example(settings.model):
        return None
    source = build_source(settings.data, settings.seed, settings.task)
    source.prepare(no_report)  # done already, by the run
    pipeline = settings.pipeline
    batch = next(training_batches(source, None, pipeline.M, 0, pipeline.replicas), None)
    if batch is None:  # the run has said so
        return None
    builders = build_model(with_example(settings, batch.micro_batches[0][0]), settings.seed)
    if not is_traced(builders):
        return None
    given = given_by(settings, build_task(settings.task, settings.seed), batch.micro_batches)
    return compare_with_module(builders, given, key_of(settings))


# -- one verification --------------------------------------------------------------------------------------------------


def steps_of(settings: Settings) -> tuple[list[int], int | None, int | None]:
    """Returns numbers of steps, from 1, as many as the run has.

    Those that are compared with the plain loop; the one whose loss is made not finite; the one before which the run is
    saved and resumed.
    """
    there = settings.trainer.steps or settings.verify.later
    first = min(settings.verify.steps, there)
    checked = list(range(1, first + 1))
    last = min(max(settings.verify.later, first + 2), there)
    if last < first + 2:
        return checked, None, None
    return sorted({*checked, first + 2, last}), first + 1, last


class Verification:
    """Runs and checks the steps of one configuration; every worker has one.

    Args:
        context, config: what the worker was started with.
        settings: configuration of the run, perhaps in float64.
        world: the worker's place among the others.
    """

    def __init__(self, context: Context, config: Mapping[str, Any], settings: Settings, world: World) -> None:
        self._context, self._config, self._world = context, config, world
        self._checked, self._skipped, self._resumed = steps_of(settings)
        trainer = dataclasses.replace(settings.trainer, nonfinite_limit=max(2, settings.trainer.nonfinite_limit))
        self._settings = dataclasses.replace(settings, trainer=trainer)
        self._quiet = Notices(context.emit, active=False)  # most of what a trainer would say, gpipe-verify has caused
        self._spill = Spill(context.run_dir / "verify")
        task, notices = build_task(settings.task, settings.seed), Notices(context.emit, world.rank == 0)
        self._assembly = assemble_model(context, self._settings, world, task, notices)
        self._watch = RunWatch(self._assembly, self._spill)
        self._checker = _checker(self._assembly, self._spill) if world.rank == 0 else None
        self._compared: dict[int, dict[str, Quantity]] = {}
        self._loss = math.nan  # of the last step
        self._notes: list[str] = []

    def run(self) -> VerifyReport | None:
        """Runs all steps; returns the report on rank 0."""
        try:
            self._run_steps()
            wait_for_all(self._world)  # not after an error: the others may never arrive
        finally:
            if self._world.rank == 0:
                self._spill.drop("")
                shutil.rmtree(checkpoints_directory(self._context.run_dir), ignore_errors=True)
        checker, memory = self._checker, peak_memory(self._world.device)
        if checker is None:
            return None
        found = findings(self._compared, checker.places, checker.model.batchnorms)
        return VerifyReport(self._settings, checker.tolerance, self._compared, found, self._notes, self._loss, memory)

    def _run_steps(self) -> None:
        trainer, checked, skipped = self._trainer(None), self._checked, self._skipped
        batches = _mini_batches(self._assembly) if self._world.rank == 0 else iter(())
        taken = trainer.steps()
        for number in range(1, checked[-1] + 1):
            before, recorded = f"held {number - 1}", number in (*checked, skipped)
            if recorded:
                self._watch.hold(before)
            if number == 1:
                self._add(number, Checker.beginning, before)
            if number == self._resumed:
                trainer = self._resume(trainer)
                self._watch.hold("resumed")
                self._add(number, Checker.unchanged, c.RESUMED, before, "resumed")
                taken = trainer.steps()
            self._watch.take()
            self._watch.active = recorded
            updates = trainer.progress.step - trainer.progress.skipped
            with self._poisoned() if number == skipped else nullcontext():
                next(taken, None)
            if trainer.progress.step < number:  # the data has ended
                self._compared.pop(number, None)
                return
            batch = next(batches, None)
            if recorded and not self._check(number, batch, before, updates):
                return
        self._evaluate(trainer)

    def _trainer(self, resumed: Any) -> Trainer:
        trainer = assemble_training(self._context, self._config, self._assembly, self._quiet, resumed)
        self._watch.follow(trainer)
        return trainer

    def _resume(self, trainer: Trainer) -> Trainer:
        """Saves a checkpoint, makes every weight wrong, and continues from the checkpoint as a resumed run does."""
        position = trainer.batches.position
        trainer.saver.begin(dataclasses.asdict(trainer.progress), position)
        trainer.saver.finish()
        self._watch.forget()
        wait_for_all(self._world)
        return self._trainer(latest(self._context.run_dir)[0])

    def _poisoned(self) -> AbstractContextManager[object]:
        """Makes losses not finite within the context."""
        engine: Engine = self._assembly.pipeline.engine
        loss = engine.loss

        def not_finite(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            value, statistics = loss(outputs, targets)
            return value * math.nan, statistics

        return patch.object(engine, "loss", not_finite)

    # -- on rank 0, while the others wait ------------------------------------------------------------------------------

    def _add(self, number: int, check: Callable[..., list[Quantity]], *arguments: object) -> None:
        """Calls ``check(checker, *arguments)`` on rank 0 while the others wait; adds what was compared to a step."""
        wait_for_all(self._world)
        if self._checker is not None:
            found = {quantity.name: quantity for quantity in check(self._checker, *arguments) if quantity.compared}
            self._compared.setdefault(number, {}).update(found)
        wait_for_all(self._world)

    def _check(self, number: int, batch: list[list[MicroBatch]] | None, before: str, updates: int) -> bool:
        """Checks a recorded step; returns on every worker whether it agrees."""
        record = self._gathered(self._watch.record)
        self._loss = record.loss

        def check(checker: Checker) -> list[Quantity]:
            if number == self._skipped:
                return checker.unchanged(c.SKIPPED, before, f"held {number}")
            if batch is None:
                raise ConfigurationError(f"the data source gave fewer mini-batches when read again: {number - 1}")
            order = _backward_order(self._assembly, len(batch[0]))
            ordered = {(r, m): replica[m] for r, replica in enumerate(batch) for m in order}
            mini_batch = MiniBatch(number - 1, ordered, record.loss_scale)
            found = checker.step(number, record, mini_batch, before, updates)
            sizes = [len(inputs[0]) for inputs, _ in ordered.values()]
            if number == 1 and checker.model.batchnorms and len(sizes) > 1:
                said = f"BatchNorm normalises over at most {max(sizes)} examples, with M=1 over all {sum(sizes)}"
                self._notes.append(f"{said}: another M gives another loss (paper, section 2.2), and that is no error")
            return found

        self._add(number, check)
        agrees = bool(self._world.broadcast(lambda: c.agrees(self._compared[number])))
        if agrees and self._checker is not None:
            for moment in (before, f"gradients {number}"):
                self._spill.drop(moment)
        return agrees

    def _gathered(self, own: RecordedStep) -> RecordedStep:
        """Returns the record of a step: on rank 0 that of all workers."""
        wait_for_all(self._world)
        for rows in self._world.gather(own.rows())[1:]:
            own.add(rows)
        return own

    def _evaluate(self, trainer: Trainer) -> None:
        """Evaluates one mini-batch as between two steps, without generation, and adds what is found to the last."""
        last, evaluator = self._checked[-1], trainer.evaluator
        self._watch.take()
        self._watch.active = True
        source: Any = None
        if evaluator.source is not None:
            share = evaluator.source.evaluation_share
            source = SimpleNamespace(evaluation_share=lambda *which: islice(share(*which), 1))
        evaluator = dataclasses.replace(evaluator, source=source, generator=None)
        with trainer.updater.averaged_weights():
            numbers = evaluator.evaluate(final=False).numbers
        record = self._gathered(RecordedStep(seen=self._watch.take()))
        self._watch.active = False
        self._watch.hold("evaluated")

        def check(checker: Checker) -> list[Quantity]:
            M, replicas = self._settings.pipeline.M, range(self._world.replicas)
            reads = [evaluation_batches(cast(Source, self._assembly.source), M, r, len(replicas)) for r in replicas]
            batches = [[*islice(read, 1)] for read in reads]
            given = {(r, m): pair for r in replicas for b in batches[r] for m, pair in enumerate(b.micro_batches)}
            return checker.evaluation(numbers, record.seen, last, MiniBatch(last - 1, given))

        self._add(last, check)


def _checker(assembly: Assembly, spill: Spill) -> Checker:
    settings, cut, names = assembly.settings, assembly.pipeline.cut, list(assembly.layers)
    owners = {
        (index, f"{names[index]}.{own}"): (names.index(owner.layer), str(owner))
        for index, tied in enumerate(cut.ties)
        for own, owner in tied.items()
    }
    places = [f"layer {names[layer]} (cell {cell})" for cell, layers in enumerate(cut.layers) for layer in layers]
    task, device = assembly.pipeline.task, assembly.world.device
    model = PlainModel(settings, task, device, owners)
    repeated = 0.0 if device.type == "cpu" else 1e-6
    return Checker(settings, names, places, model, spill, tolerance_of(settings), repeated)


def _mini_batches(assembly: Assembly) -> Iterator[list[list[MicroBatch]]]:
    """Reads the data once more: yields the micro-batches of every replica, mini-batch by mini-batch."""
    source, replicas = assembly.source, assembly.world.replicas
    assert source is not None
    M = assembly.settings.pipeline.M
    streams = [training_batches(source, None, M, replica, replicas) for replica in range(replicas)]
    for batches in zip(*streams, strict=False):
        yield [list(batch.micro_batches) for batch in batches]


def _backward_order(assembly: Assembly, micro_batches: int) -> list[int]:
    """Returns the order in which the schedule adds up the gradients of micro-batches, as in the last cell."""
    last = len(assembly.pipeline.cut.placement) - 1
    instructions = assembly.pipeline.schedule.lists(micro_batches)[assembly.pipeline.cut.placement[last]]
    adds = (Op.BACKWARD, Op.WEIGHT_GRADIENT)
    return [i.micro_batch for i in instructions if i.op in adds and i.cell == last]
