"""Passes lines to workers that answer them, and prints the answers; imports no torch."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from gpipe_cli.errors import ConfigurationError, visible
from gpipe_cli.terminal.command import to_stderr as say  # standard output holds answers only

if TYPE_CHECKING:
    from gpipe_cli.jobs.reopen import Reopened
    from gpipe_cli.terminal.words import Words


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


def line_config(run: Reopened, command: str, source: str, **keys: Any) -> dict[str, Any]:
    """Returns the workers' configuration: the run's, with its saved vocabularies in place of its data.

    A run that saved none, such as one with a user's own data source, opens its data.

    Args:
        source: the class of gpipe_cli.data.vocabulary that reads them.
        keys: of that class, beside the folder.

    Raises:
        ConfigurationError: there is more than one replica, or a vocabulary of the run has been replaced.
    """
    from gpipe_cli.checkpoint.compatibility import require_same_vocabularies, vocabularies_in
    from gpipe_cli.checkpoint.files import vocabulary_folder
    from gpipe_cli.data.vocabulary import vocabulary_file

    if run.prepared.settings.pipeline.replicas != 1:
        raise ConfigurationError(f"pipeline.replicas is 1 here: start several {command}, each on a share of the input")
    vocabularies = vocabulary_folder(run.info.run_dir)
    require_same_vocabularies(run.info, vocabularies_in(vocabularies))
    launch = {**run.config["launch"], "stall_seconds": None}  # waiting for typed input is no stall
    config = {**run.config, "launch": launch}
    if vocabulary_file(vocabularies).is_file():
        target = f"gpipe_cli.data.vocabulary.{source}"
        config["data"] = {"_target_": target, "vocabularies": str(vocabularies), **keys}
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
        given, writer = dict(config), Writer(output, scores, one_line="prompt" not in config)
        if "prompt" not in config:
            os.mkfifo(pipe := folder / "lines")
            given["input"] = str(pipe)
            lines = stack.enter_context(opened(chosen.get("input")))
            threading.Thread(target=_pass_on, args=(lines, pipe), daemon=True).start()
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


def _pass_on(lines: BinaryIO, path: Path) -> None:
    """Passes lines to rank 0 through a named pipe; ends with the input or with its reader.

    Bytes that are not UTF-8 become U+FFFD, with a warning that names the line.
    """
    with suppress(BrokenPipeError, FileNotFoundError), path.open("wb", buffering=0) as pipe:
        for number, line in enumerate(lines, start=1):
            text = line.rstrip(b"\r\n").decode(errors="replace")
            if "\ufffd" in text:
                say(f"warning: line {number} is no valid UTF-8; unreadable bytes became \ufffd")
            pipe.write(text.replace("\r", " ").encode() + b"\n")


class Writer:
    """Prints the workers' events: answers on the output, everything else on standard error.

    Args:
        scores: before each answer its log-probability and a tab.
        one_line: of each answer, as of what it answers.

    Attributes:
        lines: the number of lines that were answered.
    """

    def __init__(self, output: TextIO, scores: bool, one_line: bool) -> None:
        self._output, self._scores, self._one_line = output, scores, one_line
        self._began = time.monotonic()
        self.lines = 0

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event.get("kind") or event.get("event")
        if kind == "answers":
            self._write(event["lines"], event["texts"], event["log_probabilities"])
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
        if self._one_line:
            texts = [" ".join(text.splitlines()) for text in texts]
        if self._output.isatty():
            texts = [visible(text) for text in texts]
        for text, total in zip(texts, log_probabilities, strict=True):
            self._output.write(f"{total:.4f}\t{text}\n" if self._scores else f"{text}\n")
        self._output.flush()
        self.lines += lines
