"""Passes lines to workers that answer them, and prints the answers; imports no torch."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from gpipe_cli.errors import ConfigurationError, visible
from gpipe_cli.terminal.command import to_stderr as say  # standard output holds answers only

if TYPE_CHECKING:
    from gpipe_cli.jobs.reopen import Reopened
    from gpipe_cli.terminal.words import Words

# Lines in flight, at most: unread events of the workers are kept up to 16 MiB.
LINES_AHEAD = 4096
PREPARATION_SECONDS = 5.0


def open_for_lines(line: Words, example: str) -> Reopened:
    """Opens the run that a command line names, and says what it found.

    Raises:
        ConfigurationError: there is no such run, input or key.
    """
    from gpipe_cli.jobs.reopen import open_run

    with opened(line.own.get("input", os.devnull)):
        pass  # it can be read
    run = open_run(line.run(example), line.overrides, line.own.get("step", "last"), line.own.get("trust", ""))
    for text in (*run.warnings, *run.prepared.lines):
        say(text)
    return run


def line_config(run: Reopened, command: str, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the workers' configuration: the run's, with another data source unless it is None.

    Raises:
        ConfigurationError: there is more than one replica, or a vocabulary of the run has been replaced.
    """
    from gpipe_cli.checkpoint.compatibility import require_same_vocabularies, vocabularies_in
    from gpipe_cli.checkpoint.files import vocabulary_folder

    if run.prepared.settings.pipeline.replicas != 1:
        raise ConfigurationError(f"pipeline.replicas is 1 here: start several {command}, each on a share of the input")
    require_same_vocabularies(run.info, vocabularies_in(vocabulary_folder(run.run_dir)))
    launch = {**run.config["launch"], "stall_seconds": None}  # waiting for typed input is no stall
    config = {**run.config, "launch": launch}
    if source is not None:
        config["data"] = dict(source)
    return {"settings": config, "checkpoint": str(run.info.path.absolute())}


def answer_lines(entry: str, config: Mapping[str, Any], chosen: Mapping[str, Any]) -> tuple[Any, Writer]:
    """Runs workers that answer the lines of the input, or the one prompt in ``config``.

    Args:
        entry: of the workers.
        chosen: the command's own keys, among them perhaps `input`, `output` and `scores`.

    Returns:
        What rank 0 returned, and the writer of the answers.
    """
    from gpipe_cli.jobs.job import EntryPoint, launch_program

    with ExitStack() as stack:
        output, scores = sys.stdout, chosen.get("scores", False)
        if "output" in chosen:
            try:
                output = stack.enter_context(Path(chosen["output"]).expanduser().open("w", encoding="utf-8"))
            except OSError as error:
                raise ConfigurationError(f"output={chosen['output']}: {error.strerror}") from error
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpipe-lines-")))
        if "prompt" in config:
            writer = Writer(output, scores, None)
            return launch_program(EntryPoint(entry), dict(config), folder, writer), writer
        pipe = LinePipe(stack.enter_context(opened(chosen.get("input"))))
        writer = Writer(output, scores, pipe)
        given = {**config, "input": str(pipe.start(folder))}
        return launch_program(EntryPoint(entry), given, folder, writer), writer


@contextmanager
def opened(path: str | None) -> Iterator[BinaryIO]:
    """Yields the opened input; None: standard input.

    Raises:
        ConfigurationError: it cannot be opened.
    """
    if path is None:
        # Not sys.stdin: a thread may still be reading it when Python ends and closes it.
        yield open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115  # nothing to close
        return
    try:
        file = Path(path).expanduser().open("rb")
    except OSError as error:
        raise ConfigurationError(f"input={path}: {error.strerror}") from error
    with file:
        yield file


class LinePipe:
    """Passes lines to rank 0 through a named pipe, from its own thread, at most `LINES_AHEAD` at a time.

    Bytes that are not UTF-8 become U+FFFD, with a warning that names the line.
    """

    def __init__(self, lines: BinaryIO) -> None:
        self._lines = lines
        self._free = threading.Semaphore(LINES_AHEAD)

    def start(self, folder: Path) -> Path:
        """Starts the thread and returns the pipe's path. The thread ends with the input, its reader or this process."""
        path = folder / "lines"
        os.mkfifo(path)
        threading.Thread(target=self._pump, args=(path,), daemon=True).start()
        return path

    def answered(self, count: int) -> None:
        """Makes room for as many new lines as have been answered."""
        self._free.release(count)

    def _pump(self, path: Path) -> None:
        try:
            with path.open("wb", buffering=0) as pipe:
                for number, line in enumerate(self._lines, start=1):
                    self._free.acquire()
                    text = line.rstrip(b"\r\n").decode(errors="replace")
                    if "\ufffd" in text:
                        say(f"warning: line {number} is no valid UTF-8; unreadable bytes became \ufffd")
                    pipe.write(text.replace("\r", " ").encode() + b"\n")
        except (BrokenPipeError, FileNotFoundError):
            return  # the workers have ended; the command prints the reason


class Writer:
    """Prints the workers' events: answers on the output, everything else on standard error.

    Args:
        scores: before each answer its log-probability and a tab.
        pipe: of the lines; None: there is one prompt, whose answers may have several lines.

    Attributes:
        lines: the number of lines that were answered.
    """

    def __init__(self, output: TextIO, scores: bool, pipe: LinePipe | None) -> None:
        self._output, self._scores, self._pipe = output, scores, pipe
        self._last_preparation = -PREPARATION_SECONDS
        self._began = time.monotonic()
        self.lines = 0

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event.get("kind") or event.get("event")
        if kind == "answers":
            self._write(event["lines"], event["texts"], event["log_probabilities"])
        elif kind == "preparation":
            self._prepare(event)
        elif kind in ("message", "warning", "killed"):
            say(str(event.get("text") or event.get("message")))

    def print_end(self, result: Mapping[str, Any]) -> None:
        """Says how many lines were answered, and how many were too long.

        Args:
            result: "left_out" lines with more than "most" tokens.
        """
        from gpipe_cli.jobs.workers import plural
        from gpipe_cli.terminal.text import duration

        took = duration(time.monotonic() - self._began)
        say(f"{plural(self.lines, 'line')} in {took}, the start of the workers included")
        if result["left_out"]:
            most, count = result["most"], result["left_out"]
            say(f"warning: not answered, because they have more than {most:,} tokens: {plural(count, 'line')}")

    def _write(self, lines: int, texts: Sequence[str], log_probabilities: Sequence[float]) -> None:
        if self._pipe is not None:
            texts = [" ".join(text.splitlines()) for text in texts]
        if self._output.isatty():
            texts = [visible(text) for text in texts]
        for text, total in zip(texts, log_probabilities, strict=True):
            self._output.write(f"{total:.4f}\t{text}\n" if self._scores else f"{text}\n")
        self._output.flush()
        self.lines += lines
        if self._pipe is not None:
            self._pipe.answered(lines)

    def _prepare(self, event: dict[str, Any]) -> None:
        now, done, total = time.monotonic(), event["done"], event["total"]
        if now - self._last_preparation >= PREPARATION_SECONDS or (total and done >= total):
            self._last_preparation = now
            say(f"{event['text']}: {done:,}" + (f" of {total:,}" if total else ""))
