"""Defines the parts that all commands share: reading words, answering --help, printing, exit codes.

One grammar of words for all commands. No slow imports.

-m   --config-dir my_conf                     options, which Hydra reads
runs/NAME   sweeps/NAME/0_pipeline.K=1        paths of runs: no key stands before their =
step=best   output=FILE                       the command's own keys
pipeline.K=4   +model.x=1   ~model.y          overrides of the configuration
"""

import io
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, Any

from gpipe_cli import __version__
from gpipe_cli.disk import explain
from gpipe_cli.errors import ConfigurationError, PlainError, Problems, refuses, visible
from gpipe_cli.gpus import let_memory_grow
from gpipe_cli.launch.join import adopt_step, check_rank
from gpipe_cli.launch.report import WorkerFailed
from gpipe_cli.terminal.text import relative_paths
from gpipe_cli.typed_section import read_values, unknown_key

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes: failed; wrong configuration; Ctrl-C


def run_command(
    name: str,
    arguments: Sequence[str] | None,
    page: str | None,
    work: Callable[[list[str]], int],
    needs_words: bool = False,
    say: Callable[[str], None] | None = None,
) -> int:
    """Runs a command: answers --help and --version, or does its work. Returns the exit code.

    Args:
        name: the command, printed before the reason of a refusal.
        arguments: the words of the command line; None: those of this process.
        page: text of --help; None: python -OO has left it out.
        work: does the command's work with the words; returns the exit code.
        needs_words: True if a call without words is wrong; it then shows the page.
        say: prints the reason of a refusal or a failure; only commands that train give it. None: to standard error.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        to_stderr(f"{name}: the working directory has been deleted: change to one that exists")
        return REFUSED
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        if sys.stdout.isatty():
            sys.stdout.reconfigure(errors="replace")  # its encoding may be Latin-1 or ASCII
        else:  # files and pipes get every character, and the bytes of files' names
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    adopt_step(os.environ)
    let_memory_grow(os.environ)

    def answer() -> int:
        if {"-h", "--help"} & set(words) or (needs_words and not words):
            without = f"{name}: PYTHONOPTIMIZE=2 leaves out the help: type PYTHONOPTIMIZE=1 before the command"
            show((page or without).rstrip() + own_options(words))
            return REFUSED if needs_words and not words else 0
        if "--version" in words:
            show(f"{name} {__version__}")
            return 0
        return work(words)

    check = partial(check_rank, os.environ, trains=say is not None)
    code = exit_code(name, check, to_stderr) or exit_code(name, answer, say or to_stderr)
    try:
        sys.stdout.flush()
    except OSError:  # what failed before is still in its buffer
        to_devnull(sys.stdout)
    return code


def own_options(words: Sequence[str]) -> str:
    """Returns a line with the options in the folder of a typed `--config-dir`; empty without one."""
    folder = Words(options=list(words)).folder
    paths = sorted(Path(folder).glob("*/**/*.yaml")) if folder else []
    options = [path.relative_to(str(folder)).with_suffix("").as_posix().replace("/", "=", 1) for path in paths]
    return f"\n\nIn {folder}: {'  '.join(options) or 'no options'}" if folder else ""


def exit_code(name: str, work: Callable[[], int], say: Callable[[str], None]) -> int:
    """Does a command's work; returns its exit code, or that of the error that ended it, whose reason ``say`` prints."""
    try:
        return work()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # it was another pipe
        return 0  # a reader that stops early, as `head` does
    except Exception as error:
        if (found := code_and_reason(name, error)) is None:
            raise
        say(found[1])
        return found[0]
    except KeyboardInterrupt:
        return INTERRUPTED


def code_and_reason(name: str, error: Exception) -> tuple[int, str] | None:
    """Returns an error's exit code and its reason; None for a fault of the program, which needs a traceback."""
    if isinstance(error, (PlainError, WorkerFailed)) and not isinstance(error, ConfigurationError):
        return FAILED, relative_paths(str(error))
    if refuses(error):
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        return REFUSED, f"{name}: {relative_paths(said)}"
    text = explain(error)
    return None if text is None else (FAILED, f"{name}: {relative_paths(text)}")


def show(text: str) -> None:
    """Prints a text on standard output, control characters written out."""
    print(visible(text), flush=True)


def to_stderr(text: str) -> None:
    """Prints a text on standard error, control characters written out; nothing where that is closed."""
    with suppress(OSError):  # nobody reads it
        print(visible(text), file=sys.stderr, flush=True)


def to_devnull(stream: IO[str]) -> None:
    """Sends a stream's buffered text, and all that is written to it later, to /dev/null.

    For a stream that nobody reads any more: Python writes the buffer when it ends, and would end with an error.
    """
    with suppress(OSError, ValueError), Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def _reader_is_gone() -> bool:
    """Returns whether standard output is a pipe or terminal without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


# -- the words of a command line ---------------------------------------------------------------------------------------

WITH_VALUE = ("--config-dir", "-cd", "--cfg", "-c", "--info", "-i")
ANSWERED_BY_HYDRA = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--resolve", "--shell-completion", "-sc")
OF_PLANS = ("--config-dir", "-cd")
OF_HYDRA = (*OF_PLANS, "--multirun", "-m", *ANSWERED_BY_HYDRA)


@dataclass(frozen=True)
class Words:
    """Holds the words of a command line by kind.

    Attributes:
        overrides: keys of gpipe-train, as typed.
        own: the command's own keys that were typed, with their values.
        runs: paths of runs.
        options: options and their values, as typed.
    """

    overrides: list[str] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)

    @property
    def folder(self) -> str | None:
        """Returns the folder of `--config-dir`; None if it was not typed."""
        words = [part for word in self.options for part in word.split("=", 1)]
        return next((value for name, value in pairwise(words) if name in OF_PLANS), None)

    def has(self, *names: str) -> bool:
        """Returns whether one of these options was typed."""
        return any(word.partition("=")[0] in names for word in self.options)

    def run(self, command: str) -> str:
        """Returns the only run: a bare path, or the value of `checkpoint=`.

        Raises:
            ConfigurationError: there is none, or more than one.
        """
        runs = [*self.runs, *(str(value) for key, value in self.own.items() if key == "checkpoint")]
        if len(runs) != 1:
            said = f"one run, not {', '.join(runs)}:" if runs else "which run?"
            raise ConfigurationError(f"{said} type {command} RUN")
        return runs[0]


def read_words(
    words: Sequence[str],
    own: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
    runs: bool = True,
    overrides: bool = True,
) -> Words:
    """Reads a command line.

    Args:
        own: the type of each of the command's own keys.
        options: the command's options.
        runs: True if it takes paths of runs.
        overrides: True if it takes keys of gpipe-train.

    Raises:
        ConfigurationError: a word is none of these, or an own key has a wrong value.
    """
    line, rest, own, texts = Words(), iter(words), own or {}, dict[str, str]()
    for word in rest:
        key, equals, value = word.partition("=")
        if word.startswith("-"):
            if key not in options:
                hint = f"keys have no dashes, type {word.lstrip('-')}" if equals else "there is no such option (--help)"
                raise ConfigurationError(f"{word}: {hint}")
            line.options.append(word)
            if key in WITH_VALUE and not equals:
                line.options.extend(islice(rest, 1))
        elif is_path(word) or (runs and not overrides and key not in own and Path(word).exists()):
            if not runs:
                raise ConfigurationError(f"{word}: write key=value (--help shows what there is)")
            line.runs.append(word)
        elif key not in own:
            if not overrides:
                raise ConfigurationError(unknown_key(key, own))
            line.overrides.append(word)
        elif not value or key in texts:
            raise ConfigurationError(f"{word}: give {key} one value")
        else:
            texts[key] = value
    problems = Problems()
    line.own.update(read_values(own, {key: read_value(text, own[key]) for key, text in texts.items()}, "", problems))
    problems.refuse()
    return line


def is_path(word: str) -> bool:
    """Returns whether a word is a path: it has no =, or what stands before = is no key, as in ``0_pipeline.K=1``."""
    key, equals, _ = word.partition("=")
    key = key.lstrip("+").removeprefix("hydra/").partition("@")[0].replace(".", "_")
    return not word.startswith(("-", "~")) and not (equals and key.isidentifier())


def read_value(text: str, hint: Any) -> Any:
    """Reads a typed value as YAML, unless its type is str. For a type with list, ``2,4`` and ``2`` are lists."""
    import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

    if hint is str:
        return text
    try:
        value = yaml.safe_load(f"[{text.strip('[]')}]" if "list" in str(hint) and text != "null" else text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # 1e9 is a text in YAML 1.1
    return value
