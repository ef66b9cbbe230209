"""Implements ``gpipe-train``: composes the configuration, starts the workers, prints their events. No torch.

--help, --version and unknown options are answered before Hydra is imported.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from gpipe_cli.errors import ConfigurationError, PlainError
from gpipe_cli.terminal.command import FAILED, run_command, to_stderr
from gpipe_cli.terminal.text import command_name
from gpipe_cli.terminal.words import OF_HYDRA, Words, read_words

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gpipe_cli.jobs.job import EntryPoint


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
    line = read_words(words, options=OF_HYDRA, runs=False)
    from gpipe_cli.jobs import sweep
    from gpipe_cli.jobs.job import EntryPoint

    started_at = time.time() - time.process_time()  # Python's start and the imports so far are CPU time
    codes: list[int] = []
    sweep.current = sweep.prepared = None
    try:
        _run_jobs(line, program or EntryPoint(), started_at, codes)
    finally:
        if sweep.current is not None:
            codes.append(sweep.end(sweep.current))
    if sweep.current is None:
        return next((code for code in codes if code), 0)
    return codes[-1] or (FAILED if any(codes) else 0)  # a refused job leaves an earlier run's record as it was


def _run_jobs(line: Words, program: EntryPoint, started_at: float, codes: list[int]) -> None:
    """Runs one job or all of a sweep; Hydra composes their configurations.

    Args:
        codes: gets the exit code of each job.
    """
    import hydra

    from gpipe_cli.jobs import torchrun
    from gpipe_cli.jobs.configuration import for_hydra, in_one_line
    from gpipe_cli.jobs.job import run_job

    def task(composed: DictConfig) -> float:
        codes.append(FAILED)
        codes[-1], loss = run_job(composed, program, started_at)
        return loss

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises exceptions instead of printing them and exiting
    before = sys.argv
    with ExitStack() as stack:
        stack.callback(setattr, sys, "argv", before)
        if torchrun.is_first():
            extra = torchrun.overrides_after_restart()
        else:
            extra = torchrun.overrides_elsewhere(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpipe-")))
        sys.argv = [before[0], *line.options, *for_hydra(line.overrides), *extra]
        try:
            hydra.main(version_base="1.3", config_path="pkg://gpipe_cli.conf", config_name=program.config_name)(task)()
        except (Exception, SystemExit) as error:
            cause = error.__cause__ if isinstance(error, SystemExit) else error
            if codes or cause is None:
                raise
            if isinstance(cause, PlainError) or (isinstance(cause, OSError) and cause.errno):
                raise cause from None  # what the checks say, or what Hydra prints for --cfg cannot be written
            raise ConfigurationError(in_one_line(cause)) from cause


if __name__ == "__main__":
    sys.exit(main())
