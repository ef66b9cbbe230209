"""Defines what all commands share: answers to --help and --version, reading of words, exit codes. No slow imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpipe_cli import __version__
from gpipe_cli.disk import DiskError, explain
from gpipe_cli.errors import ConfigurationError, Problems, visible
from gpipe_cli.launch.srun import adopt_step
from gpipe_cli.terminal.output import OutputFailed, discard, open_closed_streams, reader_is_gone, show
from gpipe_cli.terminal.text import relative_paths
from gpipe_cli.typed_section import read_values

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes: failed; wrong configuration; Ctrl-C
SCREEN_LINES, SCREEN_COLUMNS = 24, 120
LONGEST_LINE = 5 * SCREEN_COLUMNS


def answer(
    words: Sequence[str],
    help_text: str | Callable[[], str],
    version_of: str | None = None,
    needs_words: bool = False,
) -> int | None:
    """Answers --help and --version.

    Args:
        words: of the command line.
        help_text: the page, or a function that makes it.
        version_of: the command's name, if it answers --version.
        needs_words: shows the page, as for a wrong call, when there are no words.

    Returns:
        The exit code, or None when there is work to do.
    """
    if {"-h", "--help"} & set(words) or (needs_words and not words):
        show((help_text if isinstance(help_text, str) else help_text()).rstrip("\n"))
        return REFUSED if needs_words and not words else 0
    if version_of is not None and "--version" in words:
        show(f"{version_of} {__version__}")
        return 0
    return None


def split_words(
    words: Sequence[str], own: Mapping[str, Any], example: str, problems: Problems
) -> tuple[dict[str, Any], list[str]]:
    """Separates a command's own ``key=value`` words from overrides of the run's configuration.

    Args:
        own: the type of each of the command's keys. `checkpoint` is one of them and must be given; a bare word stands
            for it.
        example: a correct call, for error messages.
        problems: gets one line for each word that is not ``key=value``, or whose own key has no value, a wrong one, or
            came before.
    """
    typed: dict[str, str] = {}
    overrides = []
    for word in words:
        key, equals, value = word.partition("=")
        if "checkpoint" not in typed and is_path(word):
            key, value = "checkpoint", word
        elif word.startswith("-") or not (equals or word.startswith("~")):
            problems.append(f"{word}: write key=value, as in {example} (see --help)")
            continue
        if key not in own:
            overrides.append(word)
        elif not value or key in typed:
            problems.append(f"{word}: give {key} one value, as in {example}")
        else:
            typed[key] = value
    if "checkpoint" not in typed:
        problems.append(f"checkpoint= is missing: which run? For example: {example}")
    return read_values(own, {key: read_value(text, own[key]) for key, text in typed.items()}, "", problems), overrides


def is_path(word: str) -> bool:
    """Returns whether a word is a path: it has no =, or no key before it, as the sweep's folder ``0_pipeline.K=1``."""
    key, equals, _ = word.partition("=")
    return not word.startswith(("-", "~")) and not (equals and key.lstrip("+").replace(".", "_").isidentifier())


def read_value(text: str, hint: Any) -> Any:
    """Reads a value as YAML, unless its type is a text; if it is a list, ``2,4`` and a single ``2`` are lists."""
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


def to_stderr(text: str) -> None:
    with suppress(OSError):  # nobody reads it
        print(visible(text), file=sys.stderr, flush=True)


def run_command(
    name: str,
    words: Sequence[str],
    help_text: str | Callable[[], str],
    work: Callable[[], int],
    needs_words: bool = False,
    say: Callable[[str], None] = to_stderr,
) -> int:
    """Runs a command and returns its exit code, or the code of the error that ended it.

    Args:
        name: of the command, printed before the reason of a refusal.
        words: of the command line.
        help_text: the page, or a function that makes it.
        needs_words: shows the page, as for a wrong call, when there are no words.
        say: prints the reason of a refusal or a failure.
    """
    open_closed_streams()
    adopt_step(os.environ)
    try:
        "".join([str(Path.cwd()), *words]).encode()
    except OSError:
        say(f"{name}: the current directory has been deleted: change to another one with cd")
        return REFUSED
    except UnicodeEncodeError:
        say(f"{name}: the path of the current directory, or a word of the command line, is not UTF-8: use another one")
        return REFUSED
    try:
        code = answer(words, help_text, name, needs_words)
        code = exit_code(name, work, say) if code is None else code
        sys.stdout.flush()
    except (OutputFailed, BrokenPipeError) as error:
        if isinstance(error, BrokenPipeError) and not reader_is_gone():
            raise  # it was another pipe
        discard(sys.stdout)
        if isinstance(error, BrokenPipeError) or error.reader_is_gone:
            return 0  # a reader that stops early, as `head` does
        say(f"{name}: {error}")
        return FAILED
    return code


def exit_code(name: str, work: Callable[[], int], say: Callable[[str], None] = to_stderr) -> int:
    """Runs a command's work and returns its exit code, or the code of the error that ended it."""
    from gpipe_cli.launch.report import WorkerFailed

    try:
        return work()
    except ConfigurationError as error:
        say(one_screen(f"{name}: {relative_paths(str(error))}"))
        return REFUSED
    except (WorkerFailed, DiskError) as error:
        say(relative_paths(str(error)))
        return FAILED
    except (OSError, RuntimeError) as error:
        if (text := explain(error)) is None:
            raise
        say(f"{name}: {relative_paths(text)}")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def one_screen(text: str) -> str:
    """Returns a text of at most `SCREEN_LINES` lines of a terminal with `SCREEN_COLUMNS` columns."""
    shown, rows = list[str](), 0
    lines = text.splitlines()
    for number, line in enumerate(lines):
        short = line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"
        rows += max(1, -(-len(short) // SCREEN_COLUMNS))
        if rows > SCREEN_LINES - (number + 1 < len(lines)):
            return "\n".join([*shown, f"… and {len(lines) - number} more"])
        shown.append(short)
    return "\n".join(shown)
