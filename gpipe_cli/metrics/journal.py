"""Writes the record of a run: metrics.jsonl, evaluations.jsonl, TensorBoard, summary.json, console events."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from ..config import Settings
from ..data.images.source import SquareImages
from ..data.source import Source
from ..disk import DiskError, cannot_write, whole_file, write_whole, writing
from ..pipeline.step import StepResult
from ..schedule.schedule import StepSchedule
from ..tasks.base import Task
from .breakdown import mean_breakdown
from .class_report import png
from .metrics_file import MetricsFile, json_safe
from .records import Evaluation, Progress
from .trace import Recording, draw_step, trace
from .trackers import TensorBoard, Tracking

CLASSES, AUGMENTED = "classes.json", "augmented.png"
Table: TypeAlias = Sequence[Mapping[str, Any]]
Flops: TypeAlias = float | None
SHOWN = 25  # images


class Notices:
    """Reports messages to the console and keeps no record.

    Args:
        emit: passes an event to the console (`terminal/console.py` lists them).
        active: False reports nothing, as on ranks other than 0.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None], active: bool) -> None:
        self._emit = emit if active else lambda event: None

    def message(self, text: str) -> None:
        self._emit({"kind": "message", "text": text})

    def warn(self, text: str) -> None:
        self._emit({"kind": "warning", "text": text})

    def preparation(self, text: str, done: int, total: int) -> None:
        self._emit({"kind": "preparation", "text": text, "done": done, "total": total})

    def cells(self, table: Table) -> None:
        """Reports the table of the K cells."""
        self._emit({"kind": "cells", "rows": [dict(row) for row in table]})

    def open(self, progress: Progress, schedule: StepSchedule, table: Table, flops: Flops, peak: Flops) -> None: ...
    def step(self, progress: Progress, result: StepResult, done: float | None) -> None: ...
    def evaluation(self, progress: Progress, result: Evaluation) -> None: ...
    def augmented(self, source: Source | None) -> None: ...
    def trace(self, step: int, recordings: Sequence[Recording]) -> None: ...
    def picture(self, recordings: Sequence[Recording]) -> None: ...
    def summary(self, values: Mapping[str, Any]) -> None: ...


class Journal(Notices):
    """Writes the record, on rank 0. Writes no file before `open`.

    Args:
        run_dir: the run directory.
        emit: function that passes an event to the console.
        trackers: objects with the methods that `trackers.py` describes.
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
        self._run_dir, self._logging, self._steps, self._task = run_dir, settings.logging, settings.trainer.steps, task
        self._predicted_bubble, self._shares_of_step = math.nan, dict[str, float]()  # as last simulated
        self._warned: set[Path] = set()  # of files that cannot be written

    def open(self, progress: Progress, schedule: StepSchedule, table: Table, flops: Flops, peak: Flops) -> None:
        """Opens the files. It is called when nothing can refuse the run any more.

        Args:
            progress: beginning of the run. Lines of later steps, from a run that was killed after its last checkpoint,
                are removed, and those of an evaluation that is made again.
            table: the table of the cells.
            flops: FLOPs of a micro-batch's forward; None where they are not counted.
            peak: FLOP/s that all devices could reach together; None where it is not known.

        Raises:
            DiskError: they cannot be written.
        """
        self._emit({"kind": "begun"})
        self._schedule, self._table, self._flops, self._peak = schedule, table, flops, peak
        again = progress.evaluation_due or progress.step in (0, self._steps)
        self._metrics = MetricsFile(self._run_dir / "metrics.jsonl", progress.step)
        self._evaluations_file = MetricsFile(self._run_dir / "evaluations.jsonl", progress.step - again)
        board = [TensorBoard(progress.step)] if self._logging.tensorboard else []
        self._tracking = [Tracking(tracker, self.warn) for tracker in (*board, *self._trackers)]
        self._track("start", json_safe(asdict(self._settings)), self._run_dir)

    def _track(self, method: str, *arguments: object) -> None:
        """Queues a call of a method of all trackers."""
        for tracking in self._tracking:
            tracking.call(method, *arguments)

    @contextmanager
    def _tried(self, path: Path) -> Iterator[None]:
        """Turns an error inside the context into a warning, once for each file; the run goes on without the file."""
        try:
            yield
        except Exception as error:
            if path not in self._warned:
                self._warned.add(path)
                reason = error if isinstance(error, DiskError) else f"{path}: {type(error).__name__}: {error}"
                reason = cannot_write(path, error) if isinstance(error, OSError) else reason
                self.warn(f"{reason}; the run goes on without")

    def step(self, progress: Progress, result: StepResult, done: float | None) -> None:
        """Records one training step in metrics.jsonl and on the console. At the logging interval it adds its times.

        Args:
            done: share of the run that is done; None if its end is unknown.
        """
        plan, seconds = result.plan, result.seconds
        due = progress.step % self._logging.every == 0 or progress.step in (1, self._steps)
        lists, placement = self._schedule.lists(len(plan.signatures)), self._schedule.placement
        if due or not self._shares_of_step:
            found = mean_breakdown(lists, placement, result.cells, result.numbers["update"], seconds)
            self._shares_of_step, self._predicted_bubble = found
        waited, sums = max(result.numbers["waited_for_data"]), result.statistics
        pairs = zip(self._task.statistics[::2], sums[::2], sums[1::2], strict=True)  # as ("accuracy", "examples")
        row = {
            "step": progress.step,
            "K": len(placement),
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.gradient_norm,
            "examples_per_second": plan.examples / seconds,
            f"{self._task.unit}_per_second": plan.total_weight / seconds,
            "bubble": result.bubble,
            "bubble_predicted": self._predicted_bubble,
            "seconds": seconds,
            "waited_for_data": waited,
            "waiting_for_data_share": min(1.0, waited / seconds),
            "exchange_seconds": min(result.numbers["exchange"]),  # the last worker to arrive did not wait
            "update_seconds": max(result.numbers["update"]),
            "skipped_updates": progress.skipped,
            **{name: part / whole if whole else 0.0 for name, part, whole in pairs},
        }
        if self._flops is not None:  # a backward computes twice as much as a forward
            row["flops_per_second"] = 3 * self._flops * plan.total_micro_batches / seconds
            row |= {"mfu": row["flops_per_second"] / self._peak} if self._peak else {}
        times = {"breakdown": self._shares_of_step, "cells": result.cells, "workers": result.workers} if due else {}
        rare = {"loss_scale": progress.loss_scale, "not_finite": result.not_finite}
        there = {name: value for name, value in rare.items() if value is not None}
        with self._tried(self._metrics.path):
            self._metrics.write({**row, **there, **times})
        self._emit({"kind": "progress", **json_safe(row), "steps": self._steps, "done": done})
        if due:
            numbers = {f"train/{name}": value for name, value in row.items() if name != "step"}
            numbers |= {f"breakdown/{name}": share for name, share in self._shares_of_step.items()}
            for rank, worker in enumerate(result.workers):
                numbers[f"memory/worker_{rank}_bytes"] = worker["memory_bytes"]
            self._track("log", progress.step, numbers)

    def evaluation(self, progress: Progress, result: Evaluation) -> None:
        """Records one evaluation: evaluations.jsonl, console, TensorBoard, trackers."""
        samples = [vars(sample) for sample in result.samples]
        # The effort differs between the two evaluations of an early stop's last step.
        row = {"step": progress.step, **result.numbers, **result.effort}
        sentences = Counter(sample.language for sample in result.translations)
        rare: dict[str, Any] = {"signature": result.signature, "samples": samples, "sentences": sentences}
        rare |= {"copying": result.copying, "sizes": result.sizes}
        with self._tried(self._evaluations_file.path):
            self._evaluations_file.write({**row, **{name: value for name, value in rare.items() if value}})
        self._track("log", progress.step, {f"evaluation/{name}": value for name, value in result.numbers.items()})
        if result.classes:
            with self._tried(self._run_dir / CLASSES):
                write_whole(self._run_dir / CLASSES, json.dumps({"step": progress.step, **result.classes}) + "\n")
        told = {"numbers": json_safe(result.numbers), "signature": result.signature}
        self._emit({"kind": "evaluation", "step": progress.step, **told})
        if samples:
            self._emit({"kind": "samples", "rows": samples})
            self._track("samples", progress.step, samples)

    def augmented(self, source: Source | None) -> None:
        """Writes pictures/augmented.png: images as the network sees them in its first step."""
        if not isinstance(source, SquareImages):
            return
        from torchvision.utils import make_grid  # type: ignore[import-untyped]  # slow

        path = self._run_dir / "pictures" / AUGMENTED
        with self._tried(path.parent):
            path.parent.mkdir(exist_ok=True)
            with whole_file(path) as draft:
                images = source.first_images(SHOWN)
                draft.write_bytes(png(make_grid(images, nrow=math.ceil(math.sqrt(len(images))), pad_value=255)))
            self._track("picture", path.stem, path)

    def trace(self, step: int, recordings: Sequence[Recording]) -> None:
        """Writes one step of all ranks to trace/ for trace viewers, and draws it."""
        layers = [f"{row['first']} … {row['last']}" if row["layers"] > 1 else str(row["first"]) for row in self._table]
        path = self._run_dir / "trace" / f"step_{step:06d}.trace.json"
        with self._tried(path):
            path.parent.mkdir(exist_ok=True)
            write_whole(path, json.dumps(trace(step, recordings, self._schedule.placement, layers)) + "\n")
            self.message(f"step {step} recorded: {path} (open it in https://ui.perfetto.dev)")
        self._draw(f"step_{step:06d}", f"step {step} as measured", recordings)

    def picture(self, recordings: Sequence[Recording]) -> None:
        """Draws the last step (replica 0) as measured, and lets the command write the page anew."""
        self._draw("step", "a measured step", recordings)
        self._emit({"kind": "drawn"})

    def _draw(self, name: str, title: str, recordings: Sequence[Recording]) -> None:
        """Draws a step into pictures/, and gives the picture to trackers; a failure is a warning only."""
        path = self._run_dir / "pictures" / f"{name}.svg"
        with self._tried(path.parent):
            drawing = draw_step(f"{self._schedule.kind}, {title}", recordings, self._schedule)
            if drawing is not None:
                path.parent.mkdir(exist_ok=True)
                drawing.save(path)
                self._track("picture", name, path)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Writes summary.json atomically, says where a step goes, and closes the files.

        Raises:
            DiskError: summary.json cannot be written.
        """
        path = self._run_dir / "summary.json"
        content = json_safe(values)
        with writing(path):
            write_whole(path, json.dumps(content, indent=2) + "\n")
        if shares := content["breakdown"]:
            said = (f"{name.replace('_', ' ')} {100 * share:.1f} %" for name, share in shares.items())
            self.message(f"where a step goes: {', '.join(said)}")
        self._metrics.close()
        self._evaluations_file.close()
        for tracking in self._tracking:
            tracking.finish(content)
