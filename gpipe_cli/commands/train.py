"""Implements ``gpipe-train``: composes the configuration, starts the workers, prints their events. No torch.

--help, --version and unknown options are answered before Hydra is imported.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from gpipe_cli.errors import ConfigurationError, Problems, visible
from gpipe_cli.terminal.flags import CommandLine, read_words
from gpipe_cli.terminal.frame import FAILED, REFUSED, run_command, to_stderr
from gpipe_cli.terminal.output import OutputFailed
from gpipe_cli.terminal.text import command_name

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gpipe_cli.jobs.job import EntryPoint
    from gpipe_cli.jobs.sweep import Sweep


def main(
    arguments: Sequence[str] | None = None, program: EntryPoint | None = None, help_text: str | None = None
) -> int:
    """Runs the command.

    Args:
        arguments: the words of the command line; None: those of this process.
        program: the entry point of the workers; None: the trainer.
        help_text: the page of --help; None: that of gpipe-train.

    Returns:
        The exit code: 0; 1 when a run failed; 2 when its configuration was refused; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(command_name(), words, help_text or _help_text, partial(_run, words, program), say=_say)


def _help_text() -> str:
    from gpipe_cli.terminal.help import help_text

    return help_text()


def _say(text: str) -> None:
    from gpipe_cli.jobs.torchrun import HEAD_START, is_first

    if is_first():
        to_stderr(text)
    else:
        time.sleep(HEAD_START)


def _run(words: Sequence[str], program: EntryPoint | None) -> int:
    problems = Problems()
    line = read_words(words, command_name(), problems)
    from gpipe_cli.jobs import sweep
    from gpipe_cli.jobs.composition import misread_choices
    from gpipe_cli.jobs.job import EntryPoint

    problems += misread_choices(line)
    started_at = time.time() - time.process_time()  # Python's start and the imports so far are CPU time
    codes: list[int] = []
    sweep.current = None
    try:
        if problems or _has_unknown_key(line, program or EntryPoint()):
            refuse(line, program or EntryPoint(), problems)
        _run_jobs(line, program or EntryPoint(), started_at, codes)
    finally:
        if sweep.current is not None:
            codes.append(_end_sweep(sweep.current))
    if sweep.current is None:
        return next((code for code in codes if code), 0)
    return codes[-1] or (FAILED if any(codes) else 0)  # a refused job leaves an earlier run's record as it was


def _has_unknown_key(line: CommandLine, program: EntryPoint) -> bool:
    """Returns whether a typed section has no such key, so that Hydra need not be asked first."""
    from gpipe_cli.config import TYPED, known_keys

    known = {*known_keys(), *program.own_keys}
    keys = (word.partition("=")[0] for word in line.overrides)
    return any(key not in known and key.partition(".")[0] in TYPED for key in keys)


def _run_jobs(line: CommandLine, program: EntryPoint, started_at: float, codes: list[int]) -> None:
    """Runs one job or all of a sweep; Hydra composes their configurations.

    Args:
        codes: gets the exit code of each job.
    """
    import hydra

    from gpipe_cli.jobs.job import run_job
    from gpipe_cli.jobs.own_target import complete

    has_begun = False

    def task(composed: DictConfig) -> float:
        nonlocal has_begun
        has_begun = True
        code, loss = run_job(composed, program, started_at)
        codes.append(code)
        return loss

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises exceptions instead of printing them and exiting
    try:
        with _command_line([*line.option_words, *complete(line.overrides)]):
            hydra.main(version_base="1.3", config_path="pkg://gpipe_cli.conf", config_name=program.config_name)(task)()
    except Exception as error:
        if has_begun or isinstance(error, ConfigurationError):
            raise
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OutputFailed(error) from error  # what Hydra prints for --cfg and --info
        refuse(line, program, Problems(), error)


def refuse(line: CommandLine, program: EntryPoint, problems: Problems, error: Exception | None = None) -> None:
    """Refuses a command line.

    Args:
        problems: of its options.
        error: what Hydra said.

    Raises:
        ConfigurationError: one line for each mistake.
    """
    from gpipe_cli.jobs.composition import Composer
    from gpipe_cli.jobs.job import check
    from gpipe_cli.jobs.limits import TRAINING

    composer = Composer(program.config_name, program.own_keys, command_name())
    composer.find_mistakes(line, problems, lambda composed: check(composed, line.overrides, problems, TRAINING), error)
    raise problems.error() from error


@contextmanager
def _command_line(words: Sequence[str]) -> Iterator[None]:
    """Sets `sys.argv`, which Hydra reads. Under torchrun, Hydra writes files on rank 0 only."""
    from hydra._internal.hydra import Hydra

    from gpipe_cli.jobs import torchrun
    from gpipe_cli.launch.join import joined

    before = sys.argv
    with ExitStack() as stack:
        stack.callback(setattr, sys, "argv", before)
        if not _may_set_mode(words):
            stack.callback(setattr, Hydra, "get_mode", Hydra.get_mode)
            setattr(Hydra, "get_mode", lambda *_, **__: None)  # noqa: B010  # mypy refuses to assign to a method
        if joined():
            torchrun.refuse_sweep_over_workers(words)
        if torchrun.is_first():
            extra = torchrun.overrides_after_restart()
        else:
            extra = torchrun.overrides_elsewhere(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpipe-")))
        sys.argv = [before[0], *words, *extra]
        yield


def _may_set_mode(words: Sequence[str]) -> bool:
    """Returns whether `hydra.mode` may be set, in the words or in a YAML of the user's.

    Hydra composes the configuration once more to read the mode: a third of the time of a refusal.
    """
    return any("hydra" in word or word.startswith(("--config", "-c")) for word in words)


def _end_sweep(finished: Sweep) -> int:
    """Prints the table of all jobs, also after Ctrl-C; returns the exit code."""
    from gpipe_cli.jobs import sweep
    from gpipe_cli.jobs.job import where_it_is
    from gpipe_cli.jobs.torchrun import is_first
    from gpipe_cli.terminal.output import OutputStream

    if not is_first():
        return 0
    if not finished.directory.is_dir():
        return REFUSED
    table, all_done = sweep.finish(finished)
    print(visible(f"\n{table}\n\n{where_it_is(finished.directory)}"), file=OutputStream(sys.stdout), flush=True)
    return 0 if all_done else FAILED


if __name__ == "__main__":
    sys.exit(main())
