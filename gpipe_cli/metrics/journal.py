"""Writes the record of a run: metrics.jsonl, evaluations.jsonl, TensorBoard, summary.json, console events."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import Settings
from ..disk import DiskError, Vanished, cannot_write, skipped, write_whole, writing
from ..distributed.pipeline import Pipeline
from ..schedule.simulate import Timeline
from ..tasks.base import Task
from .board import Board
from .breakdown import Breakdown, mean_breakdown, predicted_bubble
from .image_pictures import draw_classification
from .language_pictures import ModelScores, draw_languages
from .metrics_file import MetricsFile, json_safe
from .pictures import draw_breakdown, draw_loss, draw_step
from .records import Evaluation, Progress, TrainedStep
from .trace import Recording, measured_timeline, trace, write_trace
from .trackers import Tracking
from .translation_scores import languages_of

SHORT_SIMULATION = 0.02  # seconds; simulating a schedule takes that long with some thousand instructions
SIMULATION_SHARE = 0.001  # of the run's time, for longer ones


class Notices:
    """Reports messages to the console and keeps no record.

    Args:
        emit: passes an event to the console (`terminal/console.py` lists them).
        active: False: on other ranks than 0, nothing is reported.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None], active: bool) -> None:
        self._emit = emit if active else lambda event: None

    def message(self, text: str) -> None:
        self._emit({"kind": "message", "text": text})

    def warn(self, text: str) -> None:
        self._emit({"kind": "warning", "text": text})

    def preparation(self, text: str, done: int, total: int) -> None:
        self._emit({"kind": "preparation", "text": text, "done": done, "total": total})

    def cells(self, table: Sequence[Mapping[str, Any]]) -> None:
        """Reports the table of the K cells."""
        self._emit({"kind": "cells", "rows": [dict(row) for row in table]})

    def open(self, resumed_step: int, pipeline: Pipeline) -> None: ...
    def step(self, progress: Progress, step: TrainedStep, done: float | None) -> None: ...
    def evaluation(self, progress: Progress, result: Evaluation, epochs: Mapping[str, float]) -> None: ...
    def trace(self, step: int, recordings: Sequence[Recording]) -> None: ...
    def pictures(self, recordings: Sequence[Recording], breakdown: Breakdown | None, final: bool) -> None: ...
    def summary(self, values: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Journal(Notices):
    """Writes the record, on rank 0. Writes no file before `open`.

    Args:
        run_dir: of the run.
        emit: as in `Notices`.
        trackers: as `trackers.py` describes them.
    """

    def __init__(
        self,
        run_dir: Path,
        emit: Callable[[dict[str, Any]], None],
        settings: Settings,
        task: Task,
        trackers: Sequence[Any] = (),
    ) -> None:
        super().__init__(emit, True)
        self._settings, self._trackers, self._tracking = settings, trackers, list[Tracking]()
        self._run_dir, self._pictures, self._tensorboard = run_dir, run_dir / "pictures", run_dir / "tensorboard"
        self._logging, self._steps, self._task = settings.logging, settings.trainer.steps, task
        self._board: Board | None = None
        self._evaluations: list[Mapping[str, float]] = []
        self._traced: dict[int, Timeline] = {}
        self._predicted_bubble, self._shares_of_step = math.nan, dict[str, float]()  # as last simulated
        self._simulate_from = 0.0  # in seconds of `time.perf_counter`
        self._warned: set[Path] = set()  # of files that cannot be written

    def open(self, resumed_step: int, pipeline: Pipeline) -> None:
        """Opens the files; called when nothing can refuse the run any more.

        Args:
            resumed_step: lines of later steps, from a run that was killed after its last checkpoint, are removed.

        Raises:
            DiskError: they cannot be written.
        """
        self._emit({"kind": "begun"})
        self._pipeline = pipeline
        self._metrics = MetricsFile(self._run_dir / "metrics.jsonl", resumed_step)
        self._evaluations_file = MetricsFile(self._run_dir / "evaluations.jsonl", resumed_step)
        for file in (self._metrics, self._evaluations_file):
            if file.damaged:
                self.warn(skipped(file.path, file.damaged))
        if self._logging.tensorboard:
            with self._tried(self._tensorboard):
                self._board = Board(self._tensorboard, resumed_step)
        self._tracking = [Tracking(tracker, self.warn) for tracker in self._trackers]
        self._track("start", json_safe(asdict(self._settings)), self._run_dir)

    def _track(self, method: str, *arguments: object) -> None:
        for tracking in self._tracking:
            tracking.call(method, *arguments)

    @contextmanager
    def _tried(self, path: Path) -> Iterator[None]:
        """Warns, once for each file, where it cannot be written while the context lasts; the run goes on without."""
        try:
            yield
        except Vanished:
            raise
        except (OSError, DiskError) as error:
            if path not in self._warned:
                self._warned.add(path)
                reason = cannot_write(path, error) if isinstance(error, OSError) else error
                self.warn(f"{reason}; the run goes on without")

    def step(self, progress: Progress, step: TrainedStep, done: float | None) -> None:
        """Records one training step in metrics.jsonl and on the console; at the logging interval also its times.

        Args:
            done: share of the run that is done; None if its end is unknown.
        """
        report, plan, seconds = step.report, step.plan, step.seconds
        due = progress.step % self._logging.every == 0 or progress.step in (1, self._steps)
        lists, placement = self._pipeline.training_lists(len(plan.signatures)), self._pipeline.placement
        if (due or not self._shares_of_step) and (began := time.perf_counter()) >= self._simulate_from:
            self._predicted_bubble = predicted_bubble(lists, placement, report.cells)
            breakdown = mean_breakdown(lists, placement, report.cells, report.updates, seconds)
            self._shares_of_step = breakdown.shares()
            if (taken := time.perf_counter() - began) > SHORT_SIMULATION:
                self._simulate_from = began + taken / SIMULATION_SHARE
        row = {
            "step": progress.step,
            "loss": report.loss,
            "lr": step.lr,
            "grad_norm": report.gradient_norm,
            "examples_per_second": plan.examples / seconds,
            f"{self._task.unit}_per_second": plan.total_weight / seconds,
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
        shares = self._shares_of_step if due else {}
        times = {"breakdown": shares, "cells": report.cells, "workers": report.workers} if due else {}
        rare = {"loss_scale": progress.loss_scale, "not_finite": step.not_finite}
        there = {name: value for name, value in rare.items() if value is not None}
        self._record(self._metrics, {**row, **there, **times})
        self._emit({"kind": "progress", **json_safe(row), "steps": self._steps, "done": done})
        if due:
            numbers = {name: value for name, value in row.items() if name != "step"}
            self._track("log", progress.step, {f"train/{name}": value for name, value in numbers.items()})
        if self._board is not None and due:
            with self._tried(self._tensorboard):
                self._board.step(progress.step, row, report, shares)

    def _record(self, file: MetricsFile, row: Mapping[str, Any]) -> None:
        with self._tried(file.path):
            file.write(row)

    def _shares(self, statistics: Sequence[float]) -> dict[str, float]:
        """Returns the quotients of statistics, which come in pairs such as ("accuracy", "examples")."""
        pairs = zip(self._task.statistics[::2], statistics[::2], statistics[1::2], strict=True)
        return {name: part / whole if whole else 0.0 for name, part, whole in pairs}

    def evaluation(self, progress: Progress, result: Evaluation, epochs: Mapping[str, float]) -> None:
        """Records one evaluation: evaluations.jsonl, console, TensorBoard, pictures of predictions and of languages.

        Args:
            epochs: how often the training data of each language has been read; for the line.
        """
        self._evaluations.append(result.numbers)
        signature = {} if result.signature is None else {"signature": result.signature}
        counted = {"epochs": dict(epochs)} if epochs else {}
        # The effort differs between the two evaluations of an early stop's last step.
        row = {"step": progress.step, **result.numbers, **signature, **result.effort, **counted}
        samples = {"samples": [vars(sample) for sample in result.samples]} if result.samples else {}
        self._record(self._evaluations_file, {**row, **samples})
        self._track("log", progress.step, {f"evaluation/{name}": value for name, value in result.numbers.items()})
        self._emit({"kind": "evaluation", "step": progress.step, "numbers": json_safe(result.numbers)})
        if result.samples:
            self._emit({"kind": "samples", "rows": [vars(sample) for sample in result.samples]})
        drawn: list[Path] = []
        with self._tried(self._pictures):
            if progress.step > 0:  # the untrained model's are noise
                drawn = self._draw_evaluation(progress.step, result)
        for path in drawn:
            self._track("picture", path.stem, path)
        if self._board is not None:
            with self._tried(self._tensorboard):
                self._board.evaluation(progress.step, result, drawn)

    def _draw_evaluation(self, step: int, result: Evaluation) -> list[Path]:
        """Draws sample predictions, the confusion matrix, BLEU by language; pictures/ keeps the last ones."""
        self._pictures.mkdir(exist_ok=True)
        drawn = [] if result.predictions is None else draw_classification(result.predictions, self._pictures)
        languages = languages_of(result.numbers)
        if len(languages) > 1 and result.sizes:
            drawn.append(self._pictures / "languages.png")
            draw_languages([ModelScores(f"step {step:,}", 0, languages)], result.sizes, drawn[-1])
        return drawn

    def trace(self, step: int, recordings: Sequence[Recording]) -> None:
        """Writes one step of all ranks to trace/, and keeps its timeline to be drawn with the next pictures."""
        cells = [
            f"{row['first']} … {row['last']}" if row["layers"] > 1 else str(row["first"])
            for row in self._pipeline.cut.table
        ]
        path, placement = self._run_dir / "trace" / f"step_{step:06d}.trace.json", self._pipeline.placement
        self._traced[step] = measured_timeline(recordings, placement)
        with self._tried(path):
            write_trace(path, trace(step, recordings, placement, cells))
            self.message(f"step {step} recorded: {path} (open it in https://ui.perfetto.dev)")

    def pictures(self, recordings: Sequence[Recording], breakdown: Breakdown | None, final: bool) -> None:
        """Draws the last step (replica 0) as measured, the loss, and where a step goes, into pictures/.

        A failure is a warning only. `drawn` is emitted, so that the command writes the page anew.

        Args:
            final: says on the console where a step goes, and gives the pictures to trackers.
        """
        try:
            with self._tried(self._pictures):
                self._draw(recordings, breakdown)
        except Exception as error:
            self.warn(f"{self._pictures} is not complete ({type(error).__name__}: {error})")
        if final and breakdown is not None:
            self.message(f"where a step goes: {breakdown}")
        for path in sorted(self._pictures.glob("*.svg")) if final else ():
            self._track("picture", path.stem, path)
        if not final:
            self._emit({"kind": "drawn"})

    def _draw(self, recordings: Sequence[Recording], breakdown: Breakdown | None) -> None:
        folder, pipeline = self._pictures, self._pipeline
        folder.mkdir(exist_ok=True)
        for step, timeline in self._traced.items():
            drawing = draw_step(f"{pipeline.kind}, step {step} as measured", timeline, pipeline)
            drawing.save(folder / f"step_{step:06d}.svg")
        self._traced.clear()
        measured = measured_timeline(recordings, pipeline.placement)
        if any(measured.spans):
            draw_step(f"{pipeline.kind}, a measured step", measured, pipeline).save(folder / "step.svg")
            draw_loss(self._run_dir).save(folder / "loss.svg")
        if breakdown is not None:
            draw_breakdown({"measured": breakdown.shares()}).save(folder / "breakdown.svg")

    def summary(self, values: Mapping[str, Any]) -> None:
        """Writes summary.json atomically.

        Raises:
            DiskError: it cannot be written.
        """
        path = self._run_dir / "summary.json"
        with writing(path):
            write_whole(path, json.dumps(json_safe(values), indent=2) + "\n")
        self._summary = json_safe(values)

    def close(self) -> None:
        """Prints first → last evaluation and closes the files."""
        if len(self._evaluations) > 1:
            first, last = self._evaluations[0], self._evaluations[-1]
            both = [name for name in last if name in first and "/" not in name]  # without single languages
            changes = [f"{name} {first[name]:.4g} → {last[name]:.4g}" for name in both]
            if changes:  # none where nothing is held out
                self._emit({"kind": "end", "text": f"first evaluation → last: {', '.join(changes)}"})
        if self._board is not None:
            with self._tried(self._tensorboard):
                self._board.close()
        self._metrics.close()
        self._evaluations_file.close()
        for tracking in self._tracking:
            tracking.finish(self._summary)
