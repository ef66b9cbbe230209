"""Implements ``gpipe-translate``: translates lines with the model of a run. It never imports torch itself."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from gpipe_cli.errors import ConfigurationError, Problems
from gpipe_cli.terminal.frame import is_true, run_command, split_words
from gpipe_cli.terminal.frame import to_stderr as say  # standard output holds translations only

if TYPE_CHECKING:
    from gpipe_cli.jobs.checkpointed import Checkpointed

EXAMPLE = "gpipe-translate checkpoint=RUN < sentences.txt"
KEYS = ("checkpoint", "step", "input", "output", "scores", "references", "trust")
HELP = """\
gpipe-translate: translates lines with the model of a run, in cells on workers as in training.

    gpipe-translate checkpoint=RUN < sentences.txt > translations.txt
    echo 'viernes, 4 de mayo' | gpipe-translate checkpoint=RUN
    gpipe-translate checkpoint=RUN input=sentences.txt output=translations.txt references=correct.txt

checkpoint=PATH   a run directory, or one checkpoint: RUN/checkpoints/step_00000100
step=N            of a run: the checkpoint of step N; step=best: the one with the lowest loss; step=last (default)
input=FILE        UTF-8 text, one sentence a line; default: standard input
output=FILE       default: standard output. Translations come in the order of the lines, an empty one for an empty line
scores=true       before each translation its log-probability and a tab
references=FILE   correct translations: BLEU (sacreBLEU, with its signature) on standard error at the end
trust=[NAMES]     code of your own that the checkpoint may call, such as trust=[my_module.layers]

Any key of the run can be typed too, for example

pipeline.K=4                  cells; any number fits any checkpoint. pipeline.workers, pipeline.M likewise
task.generation.beam=8        hypotheses kept for each sentence; 1: greedy
task.generation.length_exponent=0.5   favours longer translations: scores are divided by ((tokens + 5) / 5)^exponent
task.generation.group=64      sentences that are translated together
"""
# Lines in flight, at most: unread events of the workers are kept up to 16 MiB.
LINES_AHEAD = 4096
LONGEST_LINE = 2**16  # bytes
PREPARATION_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 when it failed, 2 when it was refused, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command("gpipe-translate", words, HELP, partial(_translate, words), needs_words=True)


def _translate(words: Sequence[str]) -> int:
    from gpipe_cli.jobs.checkpointed import open_run
    from gpipe_cli.jobs.job import EntryPoint, launch_program

    problems = Problems()
    chosen, overrides = split_words(words, KEYS, EXAMPLE, problems)
    scores = is_true(chosen, "scores", problems)
    references = None
    with problems.collected():
        references = _read_references(chosen.get("references"))
    with problems.collected(), _opened(chosen.get("input", os.devnull)) as lines:
        if references is not None and "input" in chosen:
            refuse_other_count(sum(1 for _ in lines), references)
    step, trusted = chosen.get("step", "last"), chosen.get("trust", "")
    run = open_run(chosen.get("checkpoint", ""), overrides, step, trusted, problems)
    for line in (*run.warnings, *run.prepared.lines):
        say(line)
    config = worker_config(run)
    with ExitStack() as stack:
        lines = stack.enter_context(_opened(chosen.get("input")))
        output = sys.stdout
        if "output" in chosen:
            output = stack.enter_context(Path(chosen["output"]).expanduser().open("w", encoding="utf-8"))
        pipe = LinePipe(lines)
        writer = Writer(output, scores, pipe, keep=references is not None)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpipe-translate-")))
        program = EntryPoint("gpipe_cli.trainer.translate:main")
        result = launch_program(program, {**config, "input": str(pipe.start(folder))}, folder, writer)
    _print_end(result, config["longest"], writer)
    return _show_bleu(writer.texts, references)


def worker_config(run: Checkpointed) -> dict[str, Any]:
    """Returns the workers' configuration: the run's, with its saved vocabularies in place of its corpus.

    A run that saved none, such as one with a user's own data source, opens its data.

    Raises:
        ConfigurationError: the run's model does not translate, or there is more than one replica.
    """
    from gpipe_cli.checkpoint.files import vocabulary_folder
    from gpipe_cli.data.sentences import are_kept

    config = dict(run.config)
    if run.prepared.settings.pipeline.replicas != 1:
        raise ConfigurationError(
            "pipeline.replicas is 1 here: start several gpipe-translate, each on a share of the input"
        )
    if not config["task"].get("generation"):
        raise ConfigurationError(
            f"{run.run_dir}: its task has no section generation, so it does not generate text; if its model is "
            "a translation, type +task.generation='{per_language:1,per_language_at_end:1,group:64,max_length:64}'"
        )
    longest, vocabularies = config["data"].get("max_length"), vocabulary_folder(run.run_dir)
    if are_kept(vocabularies):
        config["data"] = {"_target_": "gpipe_cli.data.sentences.SentenceSource", "vocabularies": str(vocabularies)}
        for side in ("source", "target"):
            config["data"][f"{side}_pieces"] = config["model"].get(f"{side}_vocabulary")
    config["launch"] = {**config["launch"], "stall_seconds": None}  # waiting for typed input is no stall
    return {
        "settings": config,
        "checkpoint": str(run.info.path.absolute()),
        "longest": longest if isinstance(longest, int) else None,
    }


@contextmanager
def _opened(path: str | None) -> Iterator[BinaryIO]:
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


def _read_references(path: str | None) -> list[str] | None:
    if path is None:
        return None
    try:
        lines = Path(path).expanduser().read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"references={path}: {error}") from error
    return [line.rstrip("\r") for line in (lines if lines[-1] else lines[:-1])]


class LinePipe:
    """Passes lines to rank 0 through a named pipe, from its own thread, at most `LINES_AHEAD` at a time.

    Bytes that are not UTF-8 become U+FFFD, and a line of more than `LONGEST_LINE` bytes becomes empty, both with a
    warning that names the line.
    """

    def __init__(self, lines: BinaryIO) -> None:
        self._lines = lines
        self._room = threading.Semaphore(LINES_AHEAD)

    def start(self, folder: Path) -> Path:
        """Starts the thread and returns the pipe's path. The thread ends with the input, its reader or this process."""
        path = folder / "lines"
        os.mkfifo(path)
        threading.Thread(target=self._pump, args=(path,), daemon=True).start()
        return path

    def answered(self, count: int) -> None:
        """Makes room for as many new lines as have been translated."""
        self._room.release(count)

    def _read(self) -> bytes:
        """Returns the next line; of one that is too long its beginning, without a line's end. No more is held."""
        line = self._lines.readline(LONGEST_LINE + 1)
        if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := self._lines.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
        return line

    def _pump(self, path: Path) -> None:
        try:
            with path.open("wb", buffering=0) as pipe:
                for number, line in enumerate(iter(self._read, b""), start=1):
                    self._room.acquire()
                    if len(line) > LONGEST_LINE:
                        say(f"warning: line {number} has more than {LONGEST_LINE:,} bytes: it is not translated")
                        line = b""
                    text = line.rstrip(b"\r\n").decode(errors="replace")
                    if "\ufffd" in text:
                        say(f"warning: line {number} is no valid UTF-8; unreadable bytes became \ufffd")
                    pipe.write(text.replace("\r", " ").encode() + b"\n")
        except (BrokenPipeError, FileNotFoundError):
            return  # the workers have ended; the command prints the reason


class Writer:
    """Prints the workers' events: translations on the output, everything else on standard error.

    Attributes:
        texts: all translations, if they are kept.
        lines: the number of translations.
    """

    def __init__(self, output: TextIO, scores: bool, pipe: LinePipe, keep: bool) -> None:
        self._output, self._scores, self._pipe, self._keep = output, scores, pipe, keep
        self._last_preparation = -PREPARATION_SECONDS
        self._began = time.monotonic()
        self.texts: list[str] = []
        self.lines = 0

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event.get("kind") or event.get("event")
        if kind == "translations":
            self._write(event["texts"], event["log_probabilities"])
        elif kind == "preparation":
            self._prepare(event)
        elif kind in ("message", "warning", "killed"):
            say(str(event.get("text") or event.get("message")))

    @property
    def seconds(self) -> float:
        """Returns the seconds since the workers were started."""
        return time.monotonic() - self._began

    def _write(self, texts: Sequence[str], log_probabilities: Sequence[float]) -> None:
        for text, total in zip(texts, log_probabilities, strict=True):
            self._output.write(f"{total:.4f}\t{text}\n" if self._scores else f"{text}\n")
        self._output.flush()
        self.lines += len(texts)
        self._pipe.answered(len(texts))
        if self._keep:
            self.texts += texts
        if sys.stderr.isatty() and not self._output.isatty():
            print(f"\r{self.lines:,} lines", end="", file=sys.stderr, flush=True)

    def _prepare(self, event: dict[str, Any]) -> None:
        now, done, total = time.monotonic(), event["done"], event["total"]
        if now - self._last_preparation >= PREPARATION_SECONDS or (total and done >= total):
            self._last_preparation = now
            say(f"{event['text']}: {done:,}" + (f" of {total:,}" if total else ""))


def _print_end(result: dict[str, Any], longest: int | None, writer: Writer) -> None:
    from gpipe_cli.terminal.text import duration

    start = "\r" if sys.stderr.isatty() else ""
    say(f"{start}{writer.lines:,} lines in {duration(writer.seconds)}, the start of the workers included")
    if result["longer"]:
        say(f"warning: {result['longer']:,} lines have more than {longest} tokens, more than any sentence in training")
    if result["left_out"]:
        say(f"warning: {result['left_out']:,} lines have more than {result['most']:,} tokens: they are not translated")


def refuse_other_count(lines: int, references: Sequence[str]) -> None:
    """Refuses references that are not one for each line of the input.

    Raises:
        ConfigurationError: the counts differ.
    """
    if lines != len(references):
        raise ConfigurationError(f"references= has {len(references):,} lines, the input {lines:,}: give one for each")


def _show_bleu(texts: Sequence[str], references: Sequence[str] | None) -> int:
    if references is None:
        return 0
    from gpipe_cli.tasks.bleu import corpus_bleu

    refuse_other_count(len(texts), references)
    if texts:
        bleu, signature = corpus_bleu(texts, references)
        say(f"BLEU {bleu:.2f}  {signature}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
