"""Prints the events of a run: as a progress bar and lines, or as lines alone.

Everything printed also goes to train.log, as plain text. An event is a JSON object with "kind":

    message        text
    warning        text
    preparation    text, done, total                         progress of preparing data; total 0: unknown
    cells          rows: [{cell, worker, first, last, layers, parameters, cost, share}]
    table          title, columns: [...], rows: [[...]]      any other table
    progress       step, steps (or null), done (share of the run, or null), loss, lr, examples_per_second, bubble,
                   bubble_predicted, skipped_updates, accuracy (optional)
    evaluation     step, numbers: {name: value}
    samples        rows: [{label: text}]                     outputs beside the references
    begun                                                    nothing can refuse the run any more: for jobs/job.py

and the launcher's own, with "event": stopping (signal, grace_seconds), killed (message), warning (message). Any other
event goes only to train.log. Numbers may be null (not finite, or unknown). A run goes on when its output can no longer
be written: see `OutputStream`.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from gpipe_cli.disk import cannot_write
from gpipe_cli.errors import visible
from gpipe_cli.terminal.command import discard
from gpipe_cli.terminal.text import duration, number, percent, relative_paths, text_table

PLAIN_SECONDS = 2.0  # minimum between two progress lines: fast steps must not flood a log
LONGEST_SILENCE_SECONDS = 20.0  # maximum between two progress lines, whatever `logging.every` is
PREPARATION_SECONDS = 5.0

log = logging.getLogger("gpipe_cli")
Event = Mapping[str, Any]


class Console:
    """Prints events; a context manager, so that the progress bar is always removed.

    Args:
        every: steps between progress lines.
        mode: "auto" shows a progress bar if standard output is a terminal; "plain" never does.
        silent: prints nothing: another process of the same job does.
        brief: prints a few lines of each run: its first step, evaluations and end; the rest goes only to train.log.
    """

    def __init__(self, every: int, mode: Literal["auto", "plain"], silent: bool = False, brief: bool = False) -> None:
        self._every, self._silent, self._brief = every, silent, brief
        self._output = OutputStream(sys.stdout)
        self._rich = RichConsole(file=cast("IO[str]", self._output), highlight=False, markup=False, soft_wrap=True)
        self._bar = _Bar(self._rich) if mode == "auto" and self._rich.is_terminal and not silent else None
        self._began: tuple[float | None, float] | None = None  # share done at the first step, and its time
        self._last_line = self._last_preparation = -LONGEST_SILENCE_SECONDS
        self._warnings = _WarningsToConsole(self)

    def __enter__(self) -> Console:
        logging.getLogger().addHandler(self._warnings)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self._warnings)
        if self._bar:
            self._bar.close()

    def __call__(self, event: Event) -> None:
        """Prints one event."""
        show = self._SHOWN.get(event.get("kind") or event.get("event") or "")
        if show:
            show(self, event)
        else:
            log.info("%s", json.dumps(event, default=str))

    def say(self, text: str) -> None:
        """Prints one or more lines on standard output and in train.log."""
        log.info("%s", text)
        self._print(text)

    def detail(self, text: str) -> None:
        """Prints lines that a brief console leaves to train.log."""
        if self._brief:
            log.info("%s", text)
        else:
            self.say(text)

    def error(self, text: str, logged: bool = True) -> None:
        """Prints a failure on standard error and, if it is logged, in train.log."""
        if logged:
            log.error("%s", text, extra={"shown": True})
        if self._bar:
            self._bar.close()
        if not self._silent:
            print(visible(text), file=OutputStream(sys.stderr), flush=True)

    def warn(self, text: str) -> None:
        """Prints a warning on standard output and in train.log."""
        log.warning("%s", text, extra={"shown": True})
        self._print(f"warning: {text}", style="yellow")

    def _print(self, text: str, style: str | None = None) -> None:
        if self._silent:
            return
        if self._rich.is_terminal:
            self._rich.print(visible(text), style=style)
        else:
            print(visible(text), file=self._output, flush=True)

    # -- kinds of events -----------------------------------------------------------------------------------------

    def _message(self, event: Event) -> None:
        self.detail(relative_paths(str(event["text"])))

    def _warning(self, event: Event) -> None:
        self.warn(str(event.get("text") or event.get("message")))

    def _stopping(self, event: Event) -> None:
        self.say(
            f"{event['signal']}: the run stops after this step and saves, within {event['grace_seconds']:g} s "
            "(once more: stop at once)"
        )

    def _preparation(self, event: Event) -> None:
        done, total, now = event["done"], event["total"], time.monotonic()
        if (total and done >= total) or now - self._last_preparation >= PREPARATION_SECONDS:
            self._last_preparation = now
            self.detail(f"{event['text']}: {number(done)}" + (f" of {number(total)}" if total else ""))

    def _cells(self, event: Event) -> None:
        columns = ["cell", "worker", "layers", "from", "to", "parameters", "cost"]
        keys = ("cell", "worker", "layers", "first", "last", "parameters")
        rows = [[*(row[key] for key in keys), percent(row["share"])] for row in event["rows"]]
        self.detail(text_table(columns, rows))

    def _table(self, event: Event) -> None:
        self.detail(f"{event['title']}\n{text_table(event['columns'], event['rows'])}")

    def _progress(self, event: Event) -> None:
        step, steps = event["step"], event["steps"]
        done = event["done"]
        first = self._began is None
        share, began = self._began = self._began or (done, time.monotonic())
        left = None
        if share is not None and done is not None and share < done < 1:
            left = (time.monotonic() - began) / (done - share) * (1 - done)
        if self._bar:
            place = f"{step:,}{f'/{steps:,}' if steps else ''}"
            self._bar.show(done, f"{place}  {_progress_line(event, left, short=True)}")
        now = time.monotonic()
        silence = now - self._last_line
        due = step % self._every == 0 and silence >= PLAIN_SECONDS
        last = step == steps and not self._brief  # its figures are in the table of the sweep
        if first or last or (due and not self._brief) or silence >= LONGEST_SILENCE_SECONDS:
            self._last_line = now
            line = _progress_line(event, left)
            text = f"step {number(step)}{f'/{number(steps)}' if steps else ''}  {line}"
            if self._bar:
                log.info("%s", text)
            else:
                self.say(text)

    def _evaluation(self, event: Event) -> None:
        shown = {name: value for name, value in event["numbers"].items() if "/" not in name}  # without single languages
        numbers = ", ".join(f"{name} {number(value)}" for name, value in shown.items())
        self.say(f"evaluation after step {number(event['step'])}: {numbers or 'nothing is held out'}")

    def _samples(self, event: Event) -> None:
        width = max((len(label) for row in event["rows"] for label in row), default=0)
        blocks = ["\n".join(f"    {label:<{width}}  {text}" for label, text in row.items()) for row in event["rows"]]
        self.detail("\n\n".join(blocks))

    _SHOWN: dict[str, Callable[[Console, Event], None]] = {  # noqa: RUF012  # not a field: the same for all
        "message": _message,
        "warning": _warning,
        "killed": _warning,
        "stopping": _stopping,
        "preparation": _preparation,
        "cells": _cells,
        "table": _table,
        "progress": _progress,
        "evaluation": _evaluation,
        "samples": _samples,
    }


def _progress_line(event: Event, seconds_left: float | None, short: bool = False) -> str:
    """Returns the figures of a step; ``short``: in 80 columns, beside a progress bar."""
    loss = event["loss"]
    parts = [
        f"loss {loss:.4f}" if loss is not None else "loss not finite",
        f"accuracy {number(event['accuracy'])}" if "accuracy" in event else f"lr {event['lr']:.1e}",
        f"{number(event['examples_per_second'], 3)} {'ex/s' if short else 'examples/s'}",
        _bubble(event["bubble"], event.get("bubble_predicted"), short),
    ]
    if event.get("skipped_updates"):
        parts.append(f"{event['skipped_updates']} skipped")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def _bubble(measured: float | None, predicted: float | None, short: bool) -> str:
    """Returns the measured bubble, and the one that the schedule itself has with the same times."""
    if measured is None or predicted is None:
        return f"bubble {percent(measured)}"
    if short:
        return f"bubble {100 * measured:.0f}/{100 * predicted:.0f} %"
    return f"bubble {percent(measured)} (schedule {percent(predicted)})"


class _Bar:
    """Shows a progress bar at the bottom of a terminal."""

    def __init__(self, console: RichConsole) -> None:
        columns = (BarColumn(bar_width=8), TextColumn("{task.fields[line]}"))
        self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
        self._task: TaskID | None = None

    def show(self, done: float | None, line: str) -> None:
        if self._task is None:
            self._task = self._progress.add_task("training", line=line)
            self._progress.start()
        self._progress.update(self._task, completed=done or 0.0, total=None if done is None else 1.0, line=line)

    def close(self) -> None:
        self._progress.stop()


class _WarningsToConsole(logging.Handler):
    """Prints warnings of the launcher and of libraries, above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "shown", False):
            self._console._print(f"{record.levelname.lower()}: {record.getMessage()}", style="yellow")


class OutputStream(io.TextIOBase):
    """Wraps standard output or error so that a run goes on when they can no longer be written.

    The reader of a pipe may have died, the terminal may be closed, the disk behind a `>` may be full. After the first
    failure everything goes to /dev/null: also Python's own buffers, which it would fail to flush at its end, and what
    the user's code prints.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream  # None: Python was started with this stream closed

    def write(self, text: str) -> int:
        self._guard(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._guard(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def _guard(self, action: Callable[[IO[str]], object]) -> None:
        if self._stream is None:
            return
        try:
            action(self._stream)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed in this process
            failed, self._stream = self._stream, None
            discard(failed)
            # Not a warning, which the console would print: this may be rich's thread, which holds rich's lock.
            log.info("%s cannot be written to (%s): the run goes on", getattr(failed, "name", "the output"), error)


class TrainLog(logging.FileHandler):
    """Appends records to a file, until it cannot be written: then it warns once, and writes nothing more."""

    def __init__(self, filename: str, encoding: str = "utf-8") -> None:
        super().__init__(filename, encoding=encoding, delay=True)  # opened by the first record: see emit
        self._lost = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record; never raises an OSError, and prints no traceback of one."""
        if self._lost:
            return
        try:
            if self.stream is None:
                self.stream = self._open()
            self.stream.write(f"{self.format(record)}{self.terminator}")
            self.stream.flush()
        except OSError as error:
            self._lost = True
            self.close()
            log.warning("%s; the run goes on without it", cannot_write(Path(self.baseFilename), error))

    def close(self) -> None:
        """Closes the file, also where its last records find no room."""
        with suppress(OSError):
            super().close()
