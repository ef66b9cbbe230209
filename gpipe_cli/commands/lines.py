"""Opens a run whose workers answer lines, passes the lines to them and prints the answers; imports no torch."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gpipe_cli.errors import ConfigurationError, visible
from gpipe_cli.terminal.command import to_stderr as say  # standard output holds answers only
from gpipe_cli.terminal.text import duration, plural

if TYPE_CHECKING:
    from gpipe_cli.jobs.reopen import Reopened
    from gpipe_cli.terminal.command import Words

OWN: dict[str, Any] = {"checkpoint": str, "step": str, "trust": list[str], "scores": bool}


def reopened(command: str, line: Words) -> Reopened:
    """Opens the run of a command line.

    Raises:
        ConfigurationError: there is no such run or key, or there is more than one replica.
    """
    from gpipe_cli.jobs.reopen import open_run

    run = open_run(line.run(command), line)
    if run.prepared.settings.pipeline.replicas != 1:
        raise ConfigurationError(f"pipeline.replicas is 1 here: start several {command}, each on a share of the input")
    return run


def answer_lines(
    run: Reopened, entry: str, settings: Mapping[str, Any], scores: bool, prompt: str | None = None, **more: Any
) -> int:
    """Runs workers that answer the lines of the input, or one prompt; returns the exit code.

    Args:
        entry: entry point of the workers.
        settings: their configuration, as of `with_vocabularies`.
        scores: True prints each answer's log-probability and a tab before it.
        prompt: a text to answer in place of the input's lines.
        more: further values of the workers' configuration, beside the input.
    """
    for text in (*run.warnings, run.prepared.line):
        say(text)
    write = partial(write_answers, scores=scores, one_line=prompt is None)
    with tempfile.TemporaryDirectory(prefix="gpipe-lines-") as folder:
        if prompt is None:
            os.mkfifo(pipe := Path(folder) / "lines")
            # Not sys.stdin: the thread may still be reading it when Python ends and closes it.
            lines = open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115  # the thread closes it
            if lines.isatty():
                say("a line is answered when it is typed; Ctrl-D ends")
            threading.Thread(target=_pass_on, args=(lines, pipe), daemon=True).start()
            more["input"] = str(pipe)
        else:
            # As the lines: UTF-8 in any locale. It may be empty, and may look like a number.
            more["prompt"] = prompt.encode(errors="surrogateescape").decode(errors="replace")
        began = time.monotonic()
        result = run.launch(entry, settings, Path(folder), write, **more)
    took = duration(time.monotonic() - began)
    say(f"{plural(result['lines'], 'line')} in {took}, the start of the workers included")
    if count := result["left_out"]:
        limit = f"they have more than {result['most']:,} tokens"
        say(f"warning: not answered, because {limit}: {plural(count, 'line')}")
    if count := result["cut"]:
        keys = "task.generation.max_length, length_ratio and length_extra"
        say(f"warning: not translated to its end, because {keys} limit its tokens: {plural(count, 'line')}")
    return 0


def with_vocabularies(run: Reopened, **keys: Any) -> dict[str, Any]:
    """Returns the run's configuration with its saved vocabularies in place of its data.

    A run that saved none, such as one with a user's own data source, opens its data.

    Args:
        keys: arguments of the source that reads the vocabulary of a language model; none: the run translates.

    Raises:
        ConfigurationError: a vocabulary of the run has been replaced.
    """
    from gpipe_cli.checkpoint.compatibility import require_same_vocabularies, vocabularies_in
    from gpipe_cli.checkpoint.files import vocabulary_folder
    from gpipe_cli.data.vocabulary import vocabulary_file

    vocabularies = vocabulary_folder(run.info.run_dir)
    require_same_vocabularies(run.info, vocabularies_in(vocabularies))
    if vocabulary_file(vocabularies).is_file():
        source = "TextOfRun" if keys else "PairsOfRun"
        return run.with_data(f"gpipe_cli.data.test_sets.{source}", (), **keys)
    run.require_named_paths()
    return run.prepared.config


def _pass_on(lines: BinaryIO, path: Path) -> None:
    """Passes lines to rank 0 through a named pipe; ends with the input or with its reader.

    Bytes that are not UTF-8 become U+FFFD, with a warning that names the line.
    """
    with lines, suppress(BrokenPipeError, FileNotFoundError), path.open("wb", buffering=0) as pipe:
        for number, line in enumerate(lines, start=1):
            text = line.rstrip(b"\r\n").decode(errors="replace")
            if "\ufffd" in text:
                say(f"warning: line {number} is no valid UTF-8; unreadable bytes became \ufffd")
            pipe.write(text.replace("\r", " ").encode() + b"\n")


def tell(event: dict[str, Any]) -> None:
    """Prints the text of a message or a warning among the workers' events, on standard error."""
    if (event.get("kind") or event.get("event")) in ("message", "warning", "killed"):
        say(str(event.get("text") or event.get("message")))


def write_answers(event: dict[str, Any], scores: bool = False, one_line: bool = True) -> None:
    """Prints the workers' events: answers on standard output, everything else on standard error.

    Args:
        scores: True prints each answer's log-probability and a tab before it.
        one_line: True joins the lines of an answer, because each answers one line.
    """
    if event.get("kind") != "answers":
        tell(event)
        return
    for text, total in zip(event["texts"], event["log_probabilities"], strict=True):
        said = " ".join(text.splitlines()) if one_line else text
        said = visible(said) if sys.stdout.isatty() else said
        print(f"{total:.4f}\t{said}" if scores else said)
    sys.stdout.flush()
