"""Defines the training loop of one worker: steps, evaluations and checkpoints, in step with all other workers.

Every worker runs the same loop and takes the same branches, because everything a decision depends on comes through the
step message: the result of the step that ends together with the plan of the step that begins.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace

from ..distributed.exchange import StopRequested
from ..distributed.world import machine_id
from ..metrics.breakdown import Totals
from ..metrics.journal import Notices
from ..metrics.records import Progress, TrainedStep
from ..metrics.trace import Recording, on_one_clock
from ..pipeline.step import StepPlan, StepRecord, StepResult
from .assembly import Assembly
from .batches import TrainingBatches
from .evaluator import Evaluator
from .nonfinite import NonFinite, adjust_scale, find_cause
from .saving import Saver
from .update import Updater


@dataclass
class Trainer:
    """Trains; `assemble_training` makes its components.

    Attributes:
        progress: where the run begins or continues, kept up to date.
        around_update: called with the result of each step; returns a context in which the weights are updated.
        last_evaluation: the numbers of the last evaluation.
    """

    assembly: Assembly
    batches: TrainingBatches
    updater: Updater
    evaluator: Evaluator
    saver: Saver
    journal: Notices
    progress: Progress
    around_update: Callable[[StepResult], AbstractContextManager[None]] = lambda result: nullcontext()
    totals: Totals = field(default_factory=Totals)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    _evaluated: tuple[int, dict[str, int | None]] | None = None  # step and effort of the last evaluation

    def __post_init__(self) -> None:
        self.settings, self.pipeline = self.assembly.settings, self.assembly.pipeline
        self.where, self.message = self.pipeline.where, self.pipeline.message

    def run(self) -> None:
        """Trains until the last step, the end of the data, a limit, early stopping or a request to stop."""
        if self._is_evaluation_owed():
            self._evaluate_and_save()
        self._stop_early()
        if not self.progress.stopped_by:
            for _ in self.steps():
                if self._between_steps():
                    break
        self._finish()

    def _is_evaluation_owed(self) -> bool:
        """Returns whether to evaluate before the next step: before the first, or one that a resumed run did not end."""
        settings, progress = self.settings.trainer, self.progress
        if progress.step == 0:
            return settings.evaluate_first
        return progress.evaluation_due and (settings.steps is None or progress.step < settings.steps)

    # -- one step ----------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[None]:
        """Takes training steps and yields between them, until the run should end."""
        self.batches.open()
        self._offer()
        self.message.run()
        plan = self._read_plan(self.progress.step)
        while plan is not None:
            plan = self._step(plan)
            if plan is not None:
                yield

    def _step(self, plan: StepPlan) -> StepPlan | None:
        """Trains on one mini-batch; returns the plan of the next, or None when this was the last."""
        began, step, scale = time.perf_counter(), self.progress.step, self.progress.loss_scale or 1.0
        meter, where = self.pipeline.engine.meter, self.where
        where.step = step + 1  # as the console counts
        meter.begin_step()
        taken, steps = self.batches.take(), self.settings.trainer.steps or 0
        plan = replace(plan, micro_batches=taken, step=step, steps=steps, loss_scale=scale)
        record = self.pipeline.train_step(plan)
        result, next_plan = self._meet(record, plan)
        lr = self.updater.learning_rate
        with meter.phase("update", on_device=True), self.around_update(result), where.doing("updating the weights"):
            overflowed = self._update(result)
        seconds, cause = time.perf_counter() - began, None
        if not result.finite and not overflowed:
            cause = find_cause(result, self.pipeline, plan)
            self.updater.forget_step()
        self._write_down(TrainedStep(result, plan, lr, seconds, cause))
        if cause is not None:
            self._warn_of_non_finite(cause)
        return next_plan

    def _meet(self, record: StepRecord, plan: StepPlan) -> tuple[StepResult, StepPlan | None]:
        """Meets the other workers: returns the step's result, and the plan of the next step or None."""
        meter, message, unused = self.pipeline.engine.meter, self.message, self.pipeline.unused
        with meter.phase("data"):  # a GPU computes meanwhile
            self._offer()
        with meter.phase("gradients", on_device=True), self.where.doing("adding up the gradients"):
            self.updater.reduce_gradients(plan.loss_scale)
            squares, reached = self.updater.squared_norms(), meter.mark()
            message.write_result(record, squares, unused.used())  # waits for the GPU
        message.write_times(meter, *meter.read_step(reached), self.batches.seconds_waited)
        with meter.phase("exchange"), self.where.doing("exchanging the results of the step"):
            message.run()
            unused.clear(message.read_used)
        return message.read_result(plan.total_weight), self._read_plan(plan.step + 1)

    def _offer(self) -> None:
        self.batches.offer()
        self.saver.tell()

    def _read_plan(self, done: int) -> StepPlan | None:
        """Returns the plan of the step after ``done`` ones, or None, with the reason in ``progress.stopped_by``."""
        plan = self.message.read_plan("train")
        self.saver.complete()
        all_done = self.settings.trainer.steps is not None and done >= self.settings.trainer.steps
        self.progress.stopped_by = ("steps" if all_done else plan.stop) or self.progress.stopped_by
        return None if self.progress.stopped_by else plan

    def _update(self, result: StepResult) -> bool:
        """Updates weights and progress; returns whether the update was skipped because scaled gradients overflowed."""
        progress = self.progress
        overflowed = adjust_scale(progress, result)
        self.updater.update(result, progress.step - progress.skipped)
        if result.finite:
            progress.loss, progress.skipped_in_a_row = result.loss, 0
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += not overflowed
        progress.step += 1
        progress.evaluation_due = _is_time(self.settings.trainer.evaluate_every, progress.step)
        if overflowed:
            self.journal.message(
                f"step {progress.step}: gradients overflow {self.settings.precision.autocast or 'float32'} with their "
                f"loss scale; update skipped, the scale is {progress.loss_scale:,.0f} now"
            )
        return overflowed

    def _write_down(self, step: TrainedStep) -> None:
        """Tells console, files and TensorBoard of a finished step."""
        progress = self.progress
        if self.pipeline.world.rank == 0:  # which alone tells of them
            self.totals.add(step)
        self.journal.step(progress, step, self.batches.share_done(progress.step))
        if progress.step in self.settings.trainer.traced_steps:
            self.journal.trace(progress.step, self._recordings())

    def _warn_of_non_finite(self, why: str) -> None:
        progress, limit = self.progress, self.settings.trainer.nonfinite_limit
        self.journal.warn(f"step {progress.step}: {why}; update skipped ({progress.skipped} so far)")
        if progress.skipped_in_a_row >= limit:
            raise NonFinite(
                f"step {progress.step}: {why}; {progress.skipped_in_a_row} updates in a row had to be skipped "
                f"(trainer.nonfinite_limit={limit}). The last good weights are those of {self.saver.last_saved}. "
                "Try a lower optimizer.lr, a longer warm-up or trainer.gradient_clip"
            )

    # -- around the steps --------------------------------------------------------------------------------------

    def _between_steps(self) -> bool:
        """Saves and evaluates when it is time; True when the run should end early."""
        progress = self.progress
        if _is_time(self.settings.checkpoint.every, progress.step):
            self._save()
        if progress.evaluation_due:
            self._evaluate_and_save()
        self._stop_early()
        return bool(progress.stopped_by)

    def _stop_early(self) -> None:
        progress, patience = self.progress, self.settings.trainer.patience
        if not progress.stopped_by and patience is not None and progress.evaluations_since_best >= patience:
            progress.stopped_by = "early stopping"

    def _evaluate_and_save(self) -> None:
        """Evaluates, and saves the best; a checkpoint of this step that is there notes that it has been evaluated."""
        is_best = self._evaluate(final=False)
        if is_best or self.saver.saved_step == self.progress.step:
            self._save()

    def _evaluate(self, final: bool, counts: bool = True) -> bool:
        """Evaluates the averaged weights, or the weights; True when this is the best evaluation loss so far.

        An evaluation can take minutes: the checkpoint begun before is completed first, and a request to stop ends it.

        Args:
            final: with the effort of the last evaluation.
            counts: for `trainer.patience`, if it is time for an evaluation; one because of a time limit never does.
        """
        progress = self.progress
        counts = counts and _is_time(self.settings.trainer.evaluate_every, progress.step)
        self.saver.finish()
        try:
            with self.updater.averaged_weights(), self.where.doing("evaluating"):
                result = self.evaluator.evaluate(final)
        except StopRequested:
            progress.stopped_by = "request"
            return False
        progress.evaluation_due = False
        self.last_evaluation = result.numbers
        self._evaluated = progress.step, dict(result.effort)
        if progress.step == 0:
            result = replace(result, samples=[])  # those of an untrained model show nothing
        self.journal.evaluation(progress, result)
        if not final:
            self.draw()
        if result.loss is None or not result.loss < progress.best:
            progress.evaluations_since_best += counts
            return False
        progress.best, progress.evaluations_since_best = result.loss, 0
        progress.best_step = progress.step or None
        return progress.step > 0

    def _save(self) -> None:
        with self.where.doing("saving a checkpoint"):
            self.saver.begin(asdict(self.progress), self.batches.position)

    def _finish(self) -> None:
        progress = self.progress
        evaluated = self._evaluated == (progress.step, self.evaluator.effort(final=True))  # by early stopping
        if progress.stopped_by != "request" and not evaluated:
            was_due, progress.evaluation_due = progress.evaluation_due, True
            self._save()
            if progress.stopped_by == "end of data" and self.batches.failure is not None:
                self.saver.finish()
                with self.where.doing("reading the next mini-batch"):
                    raise self.batches.failure
            self._evaluate(final=True, counts=was_due)  # each time limit would use up patience otherwise
        self._save()
        self.saver.finish()

    def draw(self) -> None:
        """Draws the last step; every worker calls it, after each evaluation and after everything else."""
        self.journal.picture(self._recordings())

    def _recordings(self) -> list[Recording]:
        """Returns the last step of every rank, in rank order, on rank 0, else nothing; every worker calls it."""
        own = machine_id(), self.message.ended_at, self.pipeline.engine.meter.recording()
        return on_one_clock(self.pipeline.world.gather(own))


def _is_time(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
