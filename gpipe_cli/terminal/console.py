"""Prints the events of a run: as a progress bar and lines, or as lines alone.

Everything printed also goes to train.log, as plain text. An event is a JSON object with "kind":

    message        text
    warning        text
    preparation    text, done, total                         progress of preparing data; total 0: unknown
    cells          rows: [{cell, worker, first, last, layers, parameters, cost, share}]
    progress       step, steps (or null), done (share of the run, or null), loss, lr, examples_per_second, bubble,
                   bubble_predicted, skipped_updates; accuracy, flops_per_second, mfu (optional)
    evaluation     step, numbers: {name: value}, signature: of sacreBLEU (or null)
    samples        rows: [{label: text}]                     outputs beside the references
    begun                                                    nothing can refuse the run any more: for jobs/job.py

and the launcher's own, with "event": stopping (signal, grace_seconds), killed (message), warning (message). Any other
event goes only to train.log. Numbers may be null (not finite, or unknown). A run goes on when its output can no longer
be written.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn

from gpipe_cli.errors import visible
from gpipe_cli.terminal.command import to_devnull, to_stderr
from gpipe_cli.terminal.text import duration, number, percent, relative_paths, size_text, text_table

PLAIN_SECONDS = 2.0  # minimum between two progress lines: fast steps must not flood a log
LONGEST_SILENCE_SECONDS = 20.0  # maximum between two progress lines, whatever `logging.every` is
PREPARATION_SECONDS = 5.0

log = logging.getLogger("gpipe_cli")
Event = Mapping[str, Any]


class Console(logging.Handler):
    """Prints events and logged warnings. It is a context manager, which removes the progress bar at the end.

    Args:
        every: steps between progress lines.
        mode: "auto" shows a progress bar if standard output is a terminal; anything else never does.
        silent: prints nothing: another process of the same job does.
        brief: prints a few lines of each run: its first step, evaluations and end; the rest goes only to train.log.
    """

    def __init__(self, every: int, mode: str, silent: bool = False, brief: bool = False) -> None:
        super().__init__(logging.WARNING)
        self._every, self._silent, self._brief, self._lost = every, silent, brief, False
        self._rich = RichConsole(highlight=False, markup=False, soft_wrap=True)
        self._bar: Progress | None = None
        if mode == "auto" and self._rich.is_terminal and not silent:
            columns = (BarColumn(bar_width=8), TextColumn("{task.fields[line]}"))
            self._bar = Progress(*columns, console=self._rich, transient=True, refresh_per_second=4)
            self._task = self._bar.add_task("training", line="")  # shown from the first step on
        self._began: tuple[float | None, float] | None = None  # share done at the first step, and its time
        self._last_line = self._last_preparation = -LONGEST_SILENCE_SECONDS

    def __enter__(self) -> Console:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        self._stop_bar()

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a warning of the launcher or of a library, above the progress bar."""
        if not getattr(record, "shown", False):
            self._print(f"{record.levelname.lower()}: {record.getMessage()}", style="yellow")

    def _stop_bar(self) -> None:
        if self._bar:
            with suppress(OSError):  # the terminal is gone
                self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Prints one event."""
        show = getattr(self, f"_show_{event.get('kind') or event.get('event')}", None)
        if show:
            show(event)
        else:
            log.info("%s", json.dumps(event, default=str))

    def say(self, text: str) -> None:
        """Prints one or more lines on standard output and in train.log."""
        log.info("%s", text)
        self._print(text)

    def detail(self, text: str) -> None:
        """Prints lines, or only logs them if the console is brief."""
        if self._brief:
            log.info("%s", text)
        else:
            self.say(text)

    def error(self, text: str, logged: bool = True) -> None:
        """Prints a failure on standard error and, if it is logged, in train.log."""
        if logged:
            log.error("%s", text, extra={"shown": True})
        self._stop_bar()
        if not self._silent:
            to_stderr(text)

    def warn(self, *texts: str) -> None:
        """Prints warnings on standard output and in train.log."""
        for text in texts:
            log.warning("%s", text, extra={"shown": True})
            self._print(f"warning: {text}", style="yellow")

    def _print(self, text: str, style: str | None = None) -> None:
        """Prints on standard output; once that fails, prints nothing more."""
        if self._silent or self._lost:
            return
        try:
            if self._rich.is_terminal:
                self._rich.print(visible(text), style=style)
            else:
                print(visible(text), flush=True)
        except (OSError, ValueError) as error:  # no reader, no terminal, a full disk behind a >; closed in this process
            self._lost = True
            to_devnull(sys.stdout)  # with what waits in Python's buffer, which would fail at its end
            log.info("the output cannot be written to (%s): the run goes on", error)

    # -- kinds of events -----------------------------------------------------------------------------------------

    def _show_message(self, event: Event) -> None:
        self.detail(relative_paths(str(event["text"])))

    def _show_warning(self, event: Event) -> None:
        self.warn(str(event.get("text") or event.get("message")))

    _show_killed = _show_warning

    def _show_stopping(self, event: Event) -> None:
        self.say(
            f"{event['signal']}: the run stops after this step and saves, within {event['grace_seconds']:g} s "
            "(once more: stop at once)"
        )

    def _show_preparation(self, event: Event) -> None:
        done, total, now = event["done"], event["total"], time.monotonic()
        if done == total or now - self._last_preparation >= PREPARATION_SECONDS:  # 0 of 0: work without a count begins
            self._last_preparation = now
            count = f": {number(done)}" if done or total else ""
            self.detail(event["text"] + count + (f" of {number(total)}" if total else ""))

    def _show_cells(self, event: Event) -> None:
        columns = ["cell", "worker", "layers", "from", "to", "parameters", "cost"]
        keys = ("cell", "worker", "layers", "first", "last", "parameters")
        rows = [[*(row[key] for key in keys), percent(row["share"])] for row in event["rows"]]
        self.detail(text_table(columns, rows))

    def _show_progress(self, event: Event) -> None:
        """Moves the progress bar; prints a line if it is due, which with a bar only goes to train.log."""
        step, steps, done, now = event["step"], event["steps"], event["done"], time.monotonic()
        first = self._began is None
        share, began = self._began = self._began or (done, now)
        left = None
        if share is not None and done is not None and share < done < 1:
            left = (now - began) / (done - share) * (1 - done)
        place = f"{number(step)}{f'/{number(steps)}' if steps else ''}"
        line = f"{place}  {_figures(event, left)}"
        if self._bar:
            self._bar.start()
            total = None if done is None else 1.0
            self._bar.update(self._task, completed=done or 0.0, total=total, line=line)
        silence = now - self._last_line
        due = step % self._every == 0 and silence >= PLAIN_SECONDS
        last = step == steps and not self._brief  # its figures are in the table of the sweep
        if first or last or (due and not self._brief) or silence >= LONGEST_SILENCE_SECONDS:
            self._last_line = now
            predicted = event.get("bubble_predicted")
            schedule = "" if predicted is None else f" (schedule {percent(predicted)})"
            flops = f"  {size_text(event['flops_per_second'], 'FLOP/s')}" if event.get("flops_per_second") else ""
            text = f"step {line}{flops}  bubble {percent(event['bubble'])}{schedule}"
            if self._bar:
                log.info("%s", text)
            else:
                self.say(text)

    def _show_evaluation(self, event: Event) -> None:
        shown = {name: value for name, value in event["numbers"].items() if "/" not in name}  # without single languages
        numbers = ", ".join(f"{name} {number(value)}" for name, value in shown.items())
        scored = f" (sacreBLEU {event['signature']})" if event.get("signature") else ""
        self.say(f"evaluation after step {number(event['step'])}: {numbers or 'nothing is held out'}{scored}")

    def _show_samples(self, event: Event) -> None:
        width = max((len(label) for row in event["rows"] for label in row), default=0)
        blocks = ["\n".join(f"    {label:<{width}}  {text}" for label, text in row.items()) for row in event["rows"]]
        self.detail("\n\n".join(blocks))


def _figures(event: Event, seconds_left: float | None) -> str:
    """Returns the figures of a step that fit 80 columns beside a progress bar."""
    loss, unit = event["loss"], "tokens" if "tokens_per_second" in event else "examples"
    parts = [
        f"loss {loss:.4f}" if loss is not None else "loss not finite",
        f"accuracy {number(event['accuracy'])}" if "accuracy" in event else f"lr {event['lr']:.1e}",
        f"{number(event[f'{unit}_per_second'], 3)} {unit}/s",
    ]
    if event.get("mfu"):
        parts.append(f"MFU {percent(event['mfu'])}")
    if event.get("skipped_updates"):
        parts.append(f"{event['skipped_updates']} skipped")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)
