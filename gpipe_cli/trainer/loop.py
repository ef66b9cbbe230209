"""The training loop of one worker: steps, evaluations and checkpoints, in step with all other workers.

Every worker runs the same loop and takes the same turns, because all it decides on has come through the exchange
(`exchange.py`): the report of the step that ends together with the plan of the step that begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from ..distributed.batch_plan import BatchPlan
from ..distributed.exchange import Exchange, StopRequested
from ..errors import PlainError
from ..launch.context import torchrun_grace_seconds
from ..metrics.journal import Journal
from ..metrics.records import Progress
from ..metrics.step_report import StepReport, StepReporter
from ..metrics.totals import WARM_UP, Totals
from ..metrics.trace import Recording, record_everyone
from ..optim.average import WeightAverage
from ..pipeline.batchnorm import finish_batchnorm
from ..pipeline.engine import StepInput
from ..pipeline.gradients import clip_factor, fill_gradients, reduce_over_replicas, scale_gradients, squared_norms
from ..position import Position
from .assembly import Assembly
from .batches import training_batches
from .evaluation import Evaluator
from .feed import Feed
from .saving import Saver
from .start_messages import grace_warning


class NonFinite(PlainError):
    """Too many updates in a row had to be skipped because loss or gradients were not finite."""


@dataclass
class Parts:
    """What the loop works with; see `training.assemble_training` for how each is made."""

    assembly: Assembly
    exchange: Exchange
    reporter: StepReporter
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    lr_schedule: torch.optim.lr_scheduler.LRScheduler
    evaluator: Evaluator
    saver: Saver
    journal: Journal
    stop_requested: Callable[[], bool]
    where: Position


class Trainer:
    """Runs the loop.

    Args:
        parts: everything it works with.
        progress: where to go on from.
        data_position: of the last mini-batch trained on, None at the beginning.
    """

    def __init__(self, parts: Parts, progress: Progress, data_position: Any) -> None:
        self.parts, self.progress = parts, progress
        self._assembly = parts.assembly
        self._settings = parts.assembly.settings.trainer
        self._position = data_position
        self._feed: Feed | None = None
        self._parameters = [parameter for cell in parts.assembly.cells for _, parameter in cell.parameters()]
        self._batchnorms = [batchnorm for cell in parts.assembly.cells for batchnorm in cell.batchnorms]
        self._began = time.monotonic()
        self.totals = Totals()
        self.last_evaluation: dict[str, float] = {}
        self._evaluated: tuple[int, dict[str, int]] | None = None  # the last one's step, and how much it generated

    def run(self) -> None:
        """Until the last step, the end of the data, the time limit, early stopping or a request to stop."""
        if self._owes_evaluation() and self._evaluate(final=False):
            self._save(is_best=True)
        self._heed_patience()
        if not self.progress.stopped_by:
            self._train()
        self._finish()

    def _owes_evaluation(self) -> bool:
        """Before the first step where that is wanted, and where the run that is resumed was ended in one."""
        steps, progress = self._settings.steps, self.progress
        if progress.step == 0:
            return self._settings.evaluate_first
        return progress.evaluation_due and (steps is None or progress.step < steps)  # else the final one comes at once

    def _train(self) -> None:
        self._open_feed()
        self._announce_next()
        self.parts.exchange.run()
        plan = self._read_plan(self.progress.step)
        while plan is not None:
            plan = self._step(plan)
            if plan is not None and self._between_steps():
                break

    # -- one step ----------------------------------------------------------------------------------------------

    def _step(self, plan: BatchPlan) -> BatchPlan | None:
        """One mini-batch; returns the plan of the next, or None when this was the last."""
        p, a, step, began = self.parts, self._assembly, self.progress.step, time.perf_counter()
        meter = a.engine.meter
        p.where.step = step + 1  # as the console counts
        meter.begin_step()
        before = meter.phases
        steps = self._settings.steps or 0
        scale = 1 / plan.total_weight if plan.total_weight else 0.0
        parts = self._feed.micro_batches if self._feed is not None else None
        position, waited = (self._feed.position, self._feed.seconds_waited) if self._feed is not None else (None, 0.0)
        instructions = a.schedules.training_lists(len(plan.signatures))[a.world.worker]
        record = a.engine.train_step(instructions, StepInput(step, steps, plan.signatures, scale), parts)
        span = meter.end_step()
        with meter.phase("gradients"):
            self._settle_gradients()
            p.reporter.write_record(p.exchange, a.world.replica, record)
            if a.world.replica == 0:
                p.reporter.write_norms(p.exchange, a.own_parameters, squared_norms(self._parameters))
        p.reporter.write_times(p.exchange, a.world, meter, before, span, waited)
        with meter.phase("data"):
            self._announce_next()
        with meter.phase("exchange"):
            p.exchange.run()
        report = p.reporter.read(p.exchange, plan.total_weight)
        next_plan = self._read_plan(step + 1)
        self._position = position
        lr = float(p.lr_schedule.get_last_lr()[0])
        with meter.phase("update", on_device=True):
            self._update(report)
        self._tell(report, plan, lr, time.perf_counter() - began)
        return next_plan

    def _settle_gradients(self) -> None:
        fill_gradients(self._parameters)
        if self._assembly.world.replica_group is not None:
            reduce_over_replicas(self._parameters, self._assembly.world.replica_group)

    def _update(self, report: StepReport) -> None:
        p, a, progress = self.parts, self._assembly, self.progress
        if report.finite:
            scale_gradients(self._parameters, clip_factor(report.gradient_norm, self._settings.gradient_clip))
            p.optimizer.step()
            finish_batchnorm(self._batchnorms, a.world.replica_group)
            if p.average is not None:
                p.average.update(progress.step - progress.skipped)
            progress.loss, progress.skipped_in_a_row = report.loss, 0
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
            for batchnorm in self._batchnorms:
                batchnorm.take_pooled()
        p.lr_schedule.step()
        p.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.evaluation_due = _is_time(self._settings.evaluate_every, progress.step)

    def _tell(self, report: StepReport, plan: BatchPlan, lr: float, seconds: float) -> None:
        """What has become of the step, to whoever reads of it."""
        p, a, progress = self.parts, self._assembly, self.progress
        self.totals.add(report, plan, seconds)
        p.journal.step(progress, report, plan, lr, seconds, a.schedules, self._share_done())
        if progress.step in self._settings.traced_steps:
            p.journal.trace(progress.step, self._record_everyone(), a.schedules, a.cut.table)
        if self.totals.steps == WARM_UP:
            text = grace_warning(seconds, a.settings.launch.grace_seconds, torchrun_grace_seconds())
            if text:
                p.journal.warn(text)
        if not report.finite:
            self._warn_of_non_finite(report)

    def _warn_of_non_finite(self, report: StepReport) -> None:
        p, progress = self.parts, self.progress
        where = self._explain_non_finite(report)
        p.journal.warn(f"step {progress.step}: {where}; update skipped ({progress.skipped} so far)")
        if progress.skipped_in_a_row >= self._settings.nonfinite_limit:
            raise NonFinite(
                f"step {progress.step}: {where}; {progress.skipped_in_a_row} updates in a row had to be skipped "
                f"(trainer.nonfinite_limit={self._settings.nonfinite_limit}). The last good weights are those of "
                f"{p.saver.last_saved()}. Try a lower optimizer.lr, a longer warm-up or trainer.gradient_clip"
            )

    def _explain_non_finite(self, report: StepReport) -> str:
        bad = report.first_bad_micro_batch()
        if bad is not None:
            replica = f" of replica {bad[0]}" if self._assembly.world.replicas > 1 else ""
            return f"the loss of micro-batch {bad[1]}{replica} is not finite ({report.losses[bad[0]][bad[1]]})"
        if report.bad_parameter is not None:
            return f"the gradient of {self._assembly.parameter_names[report.bad_parameter]} is not finite"
        return f"the gradient norm is not finite ({report.gradient_norm})"

    # -- decisions, taken once and sent round --------------------------------------------------------------------

    def _open_feed(self) -> None:
        a = self._assembly
        if a.source is not None:
            M, replica, replicas = a.settings.pipeline.M, a.world.replica, a.world.replicas
            batches = training_batches(a.source, self._position, M, replica, replicas)
            self._feed = Feed(batches, a.task.weight)

    def _announce_next(self) -> None:
        """First workers tell what comes next; rank 0 adds whether the run should end first."""
        p, a = self.parts, self._assembly
        epochs_done = self._epochs_done()
        if self._feed is not None:
            p.where.instruction = "reading the next mini-batch"
            self._feed.advance()
            p.where.instruction = None
            a.codec.write(p.exchange, self._feed.micro_batches, self._feed.weights)
        if a.world.rank == 0:
            limit = self._settings.seconds
            if p.stop_requested():
                p.exchange.own["stop"][0] = 1
            elif limit is not None and time.monotonic() - self._began >= limit:
                p.exchange.own["stop"][0] = 2
            elif epochs_done:
                p.exchange.own["stop"][0] = 3
        p.saver.report(p.exchange)

    def _epochs_done(self) -> bool:
        """Whether the mini-batch trained on last was the last of the epochs; only first workers can tell."""
        position = self._position if self._feed is None or self._feed.position is None else self._feed.position
        return (self._share_of_epochs(position) or 0.0) >= 1

    def _share_of_epochs(self, position: Any) -> float | None:
        """How much of the epochs lies before a position of the data; only first workers can tell."""
        epochs, source = self._settings.epochs, self._assembly.source
        if epochs is None or source is None or position is None:
            return None
        return float(cast(Any, source).epoch(position)) / epochs

    def _share_done(self) -> float | None:
        """Of the run, by whichever of its limits comes first at this pace; None without any that this worker sees."""
        settings, shares = self._settings, [self._share_of_epochs(self._position)]
        if settings.steps is not None:
            shares.append(self.progress.step / settings.steps)
        if settings.seconds is not None:
            shares.append((time.monotonic() - self._began) / settings.seconds)
        return max((share for share in shares if share is not None), default=None)

    def _read_plan(self, done: int) -> BatchPlan | None:
        """The plan of the step after ``done`` ones, or None, with the reason in ``progress.stopped_by``."""
        p, a, progress = self.parts, self._assembly, self.progress
        plan = a.codec.read(p.exchange, "train")
        p.saver.read(p.exchange)
        stop = int(p.exchange.total["stop"].item())
        if self._settings.steps is not None and done >= self._settings.steps:
            progress.stopped_by = "steps"
        elif stop:
            progress.stopped_by = ("", "request", "time limit", "epochs")[stop]
        elif plan.ended:
            progress.stopped_by = "end of data"
            if len(plan.ended) < a.world.replicas:
                which = " and ".join(map(str, plan.ended))
                p.journal.warn(
                    f"the data of replica {which} ended after step {done}, that of the others did not: all stop here"
                )
        return None if progress.stopped_by else plan

    # -- around the steps ----------------------------------------------------------------------------------------

    def _between_steps(self) -> bool:
        """Saves and evaluates when it is time; True when the run should end early."""
        progress = self.progress
        saving = _is_time(self._assembly.settings.checkpoint.every, progress.step)
        if saving:
            self._save(is_best=False)
        if progress.evaluation_due:
            is_best = self._evaluate(final=False)
            if saving or is_best:
                self._save(is_best)
        self._heed_patience()
        return bool(progress.stopped_by)

    def _heed_patience(self) -> None:
        progress, patience = self.progress, self._settings.patience
        if not progress.stopped_by and patience is not None and progress.evaluations_since_best >= patience:
            progress.stopped_by = "early stopping"

    def _evaluate(self, final: bool, counts: bool = True) -> bool:
        """With the averaged weights where there are any; True when this is the best evaluation loss so far.

        ``counts``: for `trainer.patience`. It can take minutes, so what was saved before is on disk first, and a
        request to stop breaks it off.
        """
        progress, average = self.progress, self.parts.average
        self.parts.saver.finish(self.parts.exchange)
        try:
            with average.in_place_of_weights() if average is not None else nullcontext():
                result = self.parts.evaluator.evaluate(final)
        except StopRequested:
            progress.stopped_by = "request"
            return False
        progress.evaluation_due = False
        self.last_evaluation = result.numbers
        self._evaluated = progress.step, dict(result.effort)
        self.parts.journal.evaluation(progress, result, self._epochs_of_languages())
        if result.loss is None or not result.loss < progress.best:
            progress.evaluations_since_best += counts
            return False
        progress.best, progress.evaluations_since_best = result.loss, 0
        return progress.step > 0

    def _epochs_of_languages(self) -> dict[str, float]:
        """How often the pairs of each language were read; empty where there are none, or the data is read elsewhere."""
        source = cast(Any, self._assembly.source)
        return dict(source.epochs(self._position)) if hasattr(source, "epochs") else {}

    def _save(self, is_best: bool) -> None:
        self.parts.saver.begin(self.parts.exchange, asdict(self.progress), self._position, is_best)

    def _finish(self) -> None:
        p, progress = self.parts, self.progress
        is_best = False
        evaluated = self._evaluated == (progress.step, p.evaluator.effort(final=True))  # early stopping's last one
        if progress.stopped_by != "request" and not evaluated:
            was_due, progress.evaluation_due = progress.evaluation_due, True
            self._save(is_best)
            is_best = self._evaluate(final=True, counts=was_due)  # each time limit would wear out patience
        self._save(is_best)
        p.saver.finish(p.exchange)

    def draw(self) -> None:
        """The run's pictures; every worker calls it, when all else is done."""
        p, a = self.parts, self._assembly
        p.journal.pictures(self._record_everyone(), a.schedules, self.totals.breakdown(a.schedules))

    def _record_everyone(self) -> list[Recording]:
        return record_everyone(self._assembly.world, self._assembly.engine.meter, self.parts.exchange.ended_at)


def _is_time(every: int | None, step: int) -> bool:
    return bool(every) and step % cast(int, every) == 0
