"""Defines the training loop of one worker: steps, evaluations and checkpoints, in step with all other workers.

Every worker runs the same loop and takes the same branches, because everything a decision depends on comes through the
step message: the result of the step that ends together with the plan of the step that begins.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace

from ..distributed.device import machine_id
from ..distributed.step_message import StopRequested
from ..metrics.breakdown import Totals
from ..metrics.journal import Notices
from ..metrics.records import Progress
from ..metrics.trace import Recording, on_one_clock
from ..pipeline.step import StepPlan, StepResult
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
        progress: step and state at which the run begins or continues, kept up to date.
        around_update: called with the result of each step; returns the context in which the weights are updated.
        totals: adds up the figures of the steps for the summary, on rank 0.
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
        steps = self.settings.trainer.trace_steps
        self._traced = steps if isinstance(steps, list) else [steps]

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
        """Returns whether an evaluation comes before the next step.

        One may be configured before the first step, and a resumed run may have stopped before one was done.
        """
        settings, progress = self.settings.trainer, self.progress
        if progress.step == 0:
            return settings.evaluate_first
        return progress.evaluation_due and (settings.steps is None or progress.step < settings.steps)

    # -- one step ----------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[None]:
        """Takes training steps until the run should end; yields after each step but the last."""
        self.batches.open()
        self._offer()
        self.message.run()
        plan = self._read_plan(self.progress.step)
        gc.freeze()  # what has been made so far stays: it need not be looked at again and again
        try:
            while plan is not None:
                gc.disable()  # others would wait for a worker that collects garbage in a step; between steps all do
                plan = self._step(plan)
                gc.enable()
                if plan is not None:
                    yield
        finally:
            gc.enable()
            gc.unfreeze()

    def _step(self, plan: StepPlan) -> StepPlan | None:
        """Trains on one mini-batch; returns the plan of the next, or None when this was the last.

        What belongs to a phase is timed by the meter, which also names it in error reports.
        """
        meter, message, unused = self.pipeline.engine.meter, self.message, self.pipeline.unused
        began = time.perf_counter()
        meter.begin_step(self.progress.step + 1)  # as the console counts

        # 1. Take the mini-batch, which was read during the step before.
        plan = self._with_mini_batch(plan)

        # 2. Forward and backward of all its micro-batches; the gradients add up in `.grad`.
        record = self.pipeline.train_step(plan, cell_ended=self.updater.begin_sums)

        # 3. Meet all workers, once a step. They exchange this step's losses and norms, and also the plan of the *next*
        #    mini-batch, before this one's update: it is read while a GPU still computes, and needs no second meeting.
        with meter.phase("data"):
            self._offer()
        with meter.phase("gradients"):
            self.updater.reduce_gradients(plan.loss_scale)
            squares, reached = self.updater.squared_norms(), meter.mark()
            message.write_result(record, squares, unused.used())  # waits for a GPU, once a step
        message.write_times(meter, *meter.read_step(reached), self.batches.seconds_waited)
        with meter.phase("exchange"):
            message.run()
            unused.clear(message.read_used)
        result, next_plan = message.read_result(plan), self._read_plan(plan.step + 1)

        # 4. Update the weights, by what all workers know alike; not where something is not finite.
        with meter.phase("update"), self.around_update(result):
            self._update(result)

        # 5. Write down what the step was.
        result.seconds = time.perf_counter() - began
        self._write_down(result)
        return next_plan

    def _offer(self) -> None:
        """Writes into the message what this worker tells: its next mini-batch, and the step whose files it has."""
        self.batches.offer()
        if self.saver.pending is not None:
            self.saver.tell_written_step()

    def _with_mini_batch(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with the numbers of the step and, on a worker that reads data, its micro-batches."""
        step, steps, scale = self.progress.step, self.settings.trainer.steps or 0, self.progress.loss_scale or 1.0
        return replace(plan, micro_batches=self.batches.take(), step=step, steps=steps, loss_scale=scale)

    def _read_plan(self, done: int) -> StepPlan | None:
        """Returns the plan of the next step, or None if there is none, with the reason in ``progress.stopped_by``.

        Args:
            done: number of steps done before it.
        """
        plan = self.message.read_plan("train")
        if self.saver.pending is not None:
            self.saver.complete()
        all_done = self.settings.trainer.steps is not None and done >= self.settings.trainer.steps
        self.progress.stopped_by = ("steps" if all_done else plan.stop) or self.progress.stopped_by
        return None if self.progress.stopped_by else plan

    def _update(self, result: StepResult) -> None:
        """Updates the weights, unless the step is not finite, and the progress."""
        progress, result.lr = self.progress, self.updater.learning_rate
        if progress.loss_scale is not None:
            adjust_scale(progress, result)
        self.updater.update(result, progress.step - progress.skipped)
        if result.finite:
            progress.loss, progress.skipped_in_a_row = result.loss, 0
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += not result.overflowed
        progress.step += 1
        progress.evaluation_due = _is_time(self.settings.trainer.evaluate_every, progress.step)

    def _write_down(self, result: StepResult) -> None:
        """Reports a finished step to the journal, and where it went wrong if it is not finite.

        Raises:
            NonFinite: too many updates in a row were skipped.
        """
        progress = self.progress
        if result.overflowed:
            self.journal.message(
                f"step {progress.step}: gradients overflow {self.settings.precision.autocast or 'float32'} with their "
                f"loss scale; update skipped, the scale is {progress.loss_scale:,.0f} now"
            )
        elif not result.finite:
            result.not_finite = find_cause(result, self.pipeline)
            self.updater.forget_step()
        result.plan = replace(result.plan, micro_batches=None)  # results of many steps are kept, mini-batches are not
        if self.pipeline.world.rank == 0:  # which alone reports the totals
            self.totals.add(result)
        self.journal.step(progress, result, self.batches.share_done(progress.step))
        if progress.step in self._traced:
            self.journal.trace(progress.step, self._recordings())
        if result.not_finite is not None:
            self._warn_of_non_finite(result.not_finite)

    def _warn_of_non_finite(self, why: str) -> None:
        """Warns of a skipped update, or ends the run after too many in a row.

        Args:
            why: place of the first value that is not finite, in words.

        Raises:
            NonFinite: so many updates in a row were skipped.
        """
        progress, limit = self.progress, self.settings.trainer.nonfinite_limit
        self.journal.warn(f"step {progress.step}: {why}; update skipped ({progress.skipped} so far)")
        if progress.skipped_in_a_row >= limit:
            raise NonFinite(
                f"step {progress.step}: {why}; {progress.skipped_in_a_row} updates in a row had to be skipped "
                f"(trainer.nonfinite_limit={limit}). The last good weights are the newest in "
                f"{self.saver.run_dir / 'checkpoints'}. Try a lower optimizer.lr, a longer warm-up or "
                "trainer.gradient_clip"
            )

    # -- around the steps --------------------------------------------------------------------------------------

    def _between_steps(self) -> bool:
        """Saves and evaluates when it is time; returns whether the run should end early."""
        progress = self.progress
        if _is_time(self.settings.checkpoint.every, progress.step):
            self._save()
        if progress.evaluation_due:
            self._evaluate_and_save()
        self._stop_early()
        return bool(progress.stopped_by)

    def _stop_early(self) -> None:
        """Ends the run if the last `trainer.patience` evaluations were no better than the best."""
        progress, patience = self.progress, self.settings.trainer.patience
        if not progress.stopped_by and patience is not None and progress.evaluations_since_best >= patience:
            progress.stopped_by = "early stopping"

    def _evaluate_and_save(self) -> None:
        """Evaluates, and saves a checkpoint if the loss is the best so far.

        A checkpoint of this step that exists is amended, so that a resumed run does not evaluate again.
        """
        is_best = self._evaluate(final=False)
        if is_best or self.saver.saved_step == self.progress.step:
            self._save()

    def _evaluate(self, final: bool, may_count: bool = True) -> bool:
        """Evaluates the averaged weights, if the run keeps them, else the weights.

        An evaluation can take minutes. So the checkpoint begun before is completed first, and a request to stop ends
        the evaluation.

        Args:
            final: evaluate with the effort of the last evaluation.
            may_count: `trainer.patience` counts the evaluation, if one was due at this step.

        Returns:
            True if the loss is the best so far, after a step.
        """
        progress = self.progress
        counts = may_count and _is_time(self.settings.trainer.evaluate_every, progress.step)
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
        """Begins to save a checkpoint of the present step."""
        with self.where.doing("saving a checkpoint"):
            self.saver.begin(asdict(self.progress), self.batches.position)

    def _finish(self) -> None:
        """Saves and, unless the run was asked to stop, evaluates a last time.

        Raises:
            Exception: what the data source has raised, if that ended the data.
        """
        progress = self.progress
        evaluated = self._evaluated == (progress.step, self.evaluator.effort(final=True))  # by early stopping
        if progress.stopped_by != "request" and not evaluated:
            was_due, progress.evaluation_due = progress.evaluation_due, True
            self._save()
            if progress.stopped_by == "end of data" and self.batches.failure is not None:
                self.saver.finish()
                with self.where.doing("reading the next mini-batch"):
                    raise self.batches.failure
            self._evaluate(final=True, may_count=was_due)  # each time limit would use up patience otherwise
        self._save()
        self.saver.finish()

    def draw(self) -> None:
        """Draws the last step; every worker calls it, after each evaluation and after everything else."""
        self.journal.picture(self._recordings())

    def _recordings(self) -> list[Recording]:
        """Returns the times of every rank's last step, in rank order, on rank 0; every worker calls it."""
        own = machine_id(), self.message.ended_at, self.pipeline.engine.meter.recording()
        return on_one_clock(self.pipeline.world.gather(own))


def _is_time(every: int | None, step: int) -> bool:
    """Returns whether something that happens every so many steps, None for never, is due after this step."""
    return every is not None and step % every == 0
