"""Writes the record of a run: metrics.jsonl, evaluations.jsonl, TensorBoard, summary.json, console events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..disk import DiskError, Vanished, cannot_write, skipped, write_whole, writing
from ..distributed.batch_plan import BatchPlan
from ..schedule.instruction import COMPUTE
from ..schedule.run_schedules import RunSchedules
from ..schedule.simulate import Timeline
from .board import Board
from .breakdown import Breakdown, mean_breakdown, predicted_bubble
from .image_pictures import draw_classification
from .language_pictures import ModelScores, draw_languages
from .metrics_file import MetricsFile, json_safe
from .pictures import draw_breakdown, draw_loss, draw_step, draw_traced_step
from .step_report import TIME_OF, StepReport
from .trace import Recording, measured_timeline, trace, write_trace
from .translation_scores import languages_of

if TYPE_CHECKING:
    from .predictions import Predictions
    from .records import Evaluation, Progress


class Journal:
    """Writes the record on rank 0; on other ranks every method does nothing. Writes no file before `open`.

    Args:
        run_dir: of the run.
        emit: passes an event to the console (`terminal/console.py` lists them).
        active: whether this is rank 0.
        every: number of steps between TensorBoard scalars.
        tensorboard: whether to write them.
        statistics: names of the task's training statistics.
        unit: of weights: examples or tokens.
        steps: of the whole run; None if something else ends it.
    """

    def __init__(
        self,
        run_dir: Path,
        emit: Callable[[dict[str, Any]], None],
        active: bool,
        every: int,
        tensorboard: bool,
        statistics: Sequence[str],
        unit: str,
        steps: int | None,
    ) -> None:
        self._pictures = run_dir / "pictures"
        self._run_dir, self._active, self._every, self._unit, self._steps = run_dir, active, every, unit, steps
        self._emit = emit if active else _nowhere
        self._statistics = list(statistics)
        self._board: Board | None = None
        self._evaluations: list[Mapping[str, float]] = []
        self._traced: dict[int, Timeline] = {}
        self._tensorboard = tensorboard
        self._predicted_bubble: float | None = None  # at the last logging interval
        self._warned: set[Path] = set()  # of files that cannot be written

    def open(self, resumed_step: int) -> None:
        """Opens the files; called when nothing can refuse the run any more.

        Args:
            resumed_step: lines of later steps, from a run that was killed after its last checkpoint, are removed.

        Raises:
            DiskError: they cannot be written.
        """
        if not self._active:
            return
        self._emit({"kind": "begun"})
        self._metrics = MetricsFile(self._run_dir / "metrics.jsonl", resumed_step)
        self._evaluations_file = MetricsFile(self._run_dir / "evaluations.jsonl", resumed_step)
        for file in (self._metrics, self._evaluations_file):
            if file.damaged:
                self.warn(skipped(file.path, file.damaged))
        if self._tensorboard:
            self._board = Board(self._run_dir / "tensorboard", resumed_step, self.warn)

    @contextmanager
    def _tried(self, path: Path, otherwise: str) -> Iterator[None]:
        """Warns, once for each file, where it cannot be written while the context lasts."""
        try:
            yield
        except Vanished:
            raise
        except (OSError, DiskError) as error:
            if path not in self._warned:
                self._warned.add(path)
                self.warn(f"{cannot_write(path, error) if isinstance(error, OSError) else error}; {otherwise}")

    def message(self, text: str) -> None:
        self._emit({"kind": "message", "text": text})

    def warn(self, text: str) -> None:
        self._emit({"kind": "warning", "text": text})

    def preparation(self, text: str, done: int, total: int) -> None:
        self._emit({"kind": "preparation", "text": text, "done": done, "total": total})

    def cells(self, table: Sequence[Mapping[str, Any]]) -> None:
        """Reports the table of the K cells."""
        self._emit({"kind": "cells", "rows": [dict(row) for row in table]})

    def cell_times(self, table: Sequence[Mapping[str, Any]]) -> None:
        """Reports the table of the K cells with the time of each: milliseconds per step, means of the latest steps.

        Args:
            table: with `seconds` by kind of time; None where no step was taken.
        """
        timed = [row for row in table if row["seconds"]]
        shown = *(TIME_OF[op] for op in COMPUTE), "waiting", "sending"
        kinds = [kind for kind in shown if any(row["seconds"][kind] for row in timed)]
        if not timed or not self._active:
            return
        columns = ["cell", "worker", "layers", "parameters", *(f"{kind.replace('_', ' ')}, ms" for kind in kinds)]
        rows = [
            [*(row[name] for name in columns[:4]), *(f"{1e3 * row['seconds'][kind]:.1f}" for kind in kinds)]
            for row in timed
        ]
        self._emit({"kind": "table", "title": "what a step takes, cell by cell:", "columns": columns, "rows": rows})

    def step(
        self,
        progress: Progress,
        report: StepReport,
        plan: BatchPlan,
        lr: float,
        seconds: float,
        schedules: RunSchedules,
        done: float | None,
        not_finite: Mapping[str, int | str | None] | None,
    ) -> None:
        """Records one training step in metrics.jsonl and on the console; at the logging interval also its times.

        Args:
            seconds: of the whole step, its update included.
            schedules: of the run; simulated with the measured times at the logging interval only.
            done: share of the run that is done; None if its end is unknown.
            not_finite: where the step first had a value that is not finite; None for a finite step.
        """
        if not self._active:
            return
        due = progress.step % self._every == 0 or progress.step in (1, self._steps)
        lists, placement = schedules.training_lists(len(plan.signatures)), schedules.placement
        if due or self._predicted_bubble is None:
            self._predicted_bubble = predicted_bubble(lists, placement, report.cells)
        row = {
            "step": progress.step,
            "loss": report.loss,
            "lr": lr,
            "grad_norm": report.gradient_norm,
            "examples_per_second": plan.examples / seconds,
            f"{self._unit}_per_second": plan.total_weight / seconds,
            "bubble": report.bubble,
            "bubble_predicted": self._predicted_bubble,
            "seconds": seconds,
            "waited_for_data": report.waited_for_data,
            "waiting_for_data_share": min(1.0, report.waited_for_data / seconds),
            "exchange_seconds": report.exchange_seconds,
            "update_seconds": report.update_seconds,
            "skipped_updates": progress.skipped,
            **self._shares(report.statistics),
        }
        shares = mean_breakdown(lists, placement, report.cells, report.updates, seconds).shares() if due else {}
        times = {"breakdown": shares, "cells": report.cells, "workers": report.workers} if due else {}
        where = {} if not_finite is None else {"not_finite": not_finite}
        scale = {} if progress.loss_scale is None else {"loss_scale": progress.loss_scale}
        self._record(self._metrics, lambda file: file.write({**row, **scale, **where, **times}))
        self._emit({"kind": "progress", **json_safe(row), "steps": self._steps, "done": done})
        if self._board is not None and due:
            self._board.step(progress.step, row, report, shares)

    def _record(self, file: MetricsFile, write: Callable[[MetricsFile], None]) -> None:
        with self._tried(file.path, "its rows are kept in memory until there is room"):
            write(file)

    def _shares(self, statistics: Sequence[float]) -> dict[str, float]:
        """Returns the quotients of statistics, which come in pairs such as ("accuracy", "examples")."""
        pairs = zip(self._statistics[::2], statistics[::2], statistics[1::2], strict=True)
        return {name: part / whole if whole else 0.0 for name, part, whole in pairs}

    def evaluation(self, progress: Progress, result: Evaluation, epochs: Mapping[str, float]) -> None:
        """Records one evaluation: evaluations.jsonl, console, TensorBoard.

        Args:
            epochs: how often the training data of each language has been read; for the line.
        """
        if not self._active:
            return
        self._evaluations.append(result.numbers)
        numbers = {f"evaluation/{name}": value for name, value in result.numbers.items()}
        counted: dict[str, Any] = {} if result.signature is None else {"signature": result.signature}
        counted |= result.effort  # differs between the two evaluations of an early stop's last step
        counted |= {"epochs": dict(epochs)} if epochs else {}
        self._record(
            self._evaluations_file, lambda file: file.write({"step": progress.step, **result.numbers, **counted})
        )
        self._emit({"kind": "evaluation", "step": progress.step, "numbers": json_safe(result.numbers)})
        if result.samples:
            self._emit({"kind": "samples", "rows": [vars(sample) for sample in result.samples]})
        if self._board is not None:
            self._board.scalars(progress.step, numbers)
            self._board.samples(progress.step, result.samples)
        with self._tried(self._pictures, "the run goes on without"):
            if result.predictions is not None and progress.step > 0:  # the untrained model's are noise
                self._show_predictions(result.predictions, progress.step)
            if len(languages_of(result.numbers)) > 1 and result.sizes and progress.step > 0:
                self._show_languages(result, progress.step)
        if self._board is not None:
            self._board.flush()

    def _show_languages(self, result: Evaluation, step: int) -> None:
        """Draws pictures/languages.png: BLEU from the language with the most data to the one with the least."""
        self._pictures.mkdir(exist_ok=True)
        path = self._pictures / "languages.png"
        draw_languages([ModelScores(f"step {step:,}", 0, languages_of(result.numbers))], result.sizes, path)
        if self._board is not None:
            self._board.picture(step, path)

    def _show_predictions(self, predictions: Predictions, step: int) -> None:
        """Draws sample predictions and the confusion matrix; pictures/ keeps the last ones, TensorBoard all."""
        self._pictures.mkdir(exist_ok=True)
        for path in draw_classification(predictions, self._pictures):
            if self._board is not None:
                self._board.picture(step, path)

    def trace(
        self, step: int, recordings: Sequence[Recording], schedules: RunSchedules, cells: Sequence[Mapping[str, Any]]
    ) -> None:
        """Writes one step of all workers to trace/, and keeps its timeline to be drawn at the end.

        Args:
            recordings: of every rank.
            cells: the table of the cells.
        """
        if not self._active:
            return
        layers = [f"{row['first']} … {row['last']}" if row["layers"] > 1 else str(row["first"]) for row in cells]
        path = self._run_dir / "trace" / f"step_{step:06d}.trace.json"
        # Drawn when the run ends: drawing takes a second, for which the other workers would wait.
        self._traced[step] = measured_timeline(recordings, schedules.placement)
        with self._tried(path, "the run goes on without"):
            write_trace(path, trace(step, recordings, schedules.placement, layers))
            self.message(f"step {step} recorded: {path} (open it in https://ui.perfetto.dev)")

    def pictures(self, recordings: Sequence[Recording], schedules: RunSchedules, breakdown: Breakdown | None) -> None:
        """Draws the last step (replica 0) as measured, the loss, and where a step goes, into pictures/.

        A failure is a warning only: the run has done its work.
        """
        if not self._active:
            return
        try:
            with self._tried(self._pictures, "the run goes on without"):
                self._draw(recordings, schedules, breakdown)
        except Exception as error:
            self.warn(f"{self._pictures} is not complete ({type(error).__name__}: {error})")
        if breakdown is not None:
            self.message(f"where a step goes: {breakdown}")

    def _draw(self, recordings: Sequence[Recording], schedules: RunSchedules, breakdown: Breakdown | None) -> None:
        folder = self._pictures
        folder.mkdir(exist_ok=True)
        for step, timeline in self._traced.items():
            name = f"step_{step:06d}"
            draw_traced_step(step, timeline, schedules, [folder / f"{name}.png", folder / f"{name}.svg"])
        measured = measured_timeline(recordings, schedules.placement)
        if any(measured.spans):
            draw_step(measured, schedules.kind, folder / "step.png")
            draw_loss(self._run_dir, folder / "loss.png")
        if breakdown is not None:
            draw_breakdown({"measured": breakdown.shares()}, folder / "breakdown.png", "Where a step goes")

    def summary(self, values: Mapping[str, Any]) -> None:
        """Writes summary.json atomically.

        Raises:
            DiskError: it cannot be written.
        """
        if not self._active:
            return
        path = self._run_dir / "summary.json"
        with writing(path):
            write_whole(path, json.dumps(json_safe(values), indent=2) + "\n")

    def close(self) -> None:
        """Prints first → last evaluation and closes the files.

        Raises:
            DiskError: rows of metrics.jsonl or evaluations.jsonl could not be written up to now.
        """
        if len(self._evaluations) > 1:
            first, last = self._evaluations[0], self._evaluations[-1]
            both = [name for name in last if name in first and "/" not in name]  # without single languages
            changes = [f"{name} {first[name]:.4g} → {last[name]:.4g}" for name in both]
            self._emit({"kind": "end", "text": f"first evaluation → last: {', '.join(changes)}"})
        if self._board is not None:
            self._board.close()
        if self._active:
            try:
                self._metrics.close()
                self._evaluations_file.close()
            except DiskError as error:
                raise DiskError(f"{error}; its last rows are lost, the checkpoints are complete") from error


class Notices(Journal):
    """Reports messages to the console and keeps no record of steps.

    Args:
        run_dir, emit, active: as in `Journal`.
    """

    def __init__(self, run_dir: Path, emit: Callable[[dict[str, Any]], None], active: bool) -> None:
        super().__init__(run_dir, emit, False, 1, False, (), "", None)
        self._emit = emit if active else _nowhere


def _nowhere(event: dict[str, Any]) -> None:
    """Discards an event; for all ranks but 0."""
