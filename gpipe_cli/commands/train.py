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

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.terminal.frame import FAILED, REFUSED, answer, exit_code, to_stderr
from gpipe_cli.terminal.text import command_name
from gpipe_cli.typed_section import nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gpipe_cli.jobs.job import EntryPoint
    from gpipe_cli.jobs.sweep import Sweep

HYDRA_FLAGS = (
    *("--hydra-help", "--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--experimental-rerun", "--info", "-i"),
)
FLAGS = ("--help", "-h", "--version", *HYDRA_FLAGS)


def main(arguments: Sequence[str] | None = None, program: EntryPoint | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the words of the command line; None: those of this process.
        program: the entry point of the workers; None: the trainer.

    Returns:
        The exit code: 0; 1 when a run failed; 2 when its configuration was refused; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = answer(words, _help_text, "gpipe-train")
    return exit_code(command_name(), partial(_run, words, program), _say) if code is None else code


def _help_text() -> str:
    from gpipe_cli.terminal.help import help_text

    return help_text()


def _say(text: str) -> None:
    from gpipe_cli.jobs.torchrun import HEAD_START, is_first

    if is_first():
        to_stderr(text)
    else:
        time.sleep(HEAD_START)


def refuse_unknown_flags(words: Sequence[str]) -> None:
    """Refuses unknown options, before Hydra's parser would print all of its own.

    Raises:
        ConfigurationError: a word begins with a dash and is no option.
    """
    for word in words:
        flag = word.partition("=")[0]
        if not word.startswith("-") or flag in FLAGS:
            continue
        if "=" in word:
            raise ConfigurationError(f"{word}: keys have no dashes, type {word.lstrip('-')}")
        near = nearest(flag, FLAGS)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigurationError(f"there is no option {word}; {guess}`gpipe-train --help` shows what there is")


def _run(words: Sequence[str], program: EntryPoint | None) -> int:
    refuse_unknown_flags(words)
    import hydra

    from gpipe_cli.jobs import own_target, sweep
    from gpipe_cli.jobs.job import EntryPoint, run_job
    from gpipe_cli.terminal.hydra_errors import KNOWN, explain

    started_at = time.time() - time.process_time()  # Python's start and the imports so far are CPU time
    codes: list[int] = []

    chosen = program or EntryPoint()

    def task(composed: DictConfig) -> float:
        code, loss = run_job(composed, chosen, started_at)
        codes.append(code)
        return loss

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises exceptions instead of printing them and exiting
    sweep.current = None
    try:
        with _command_line(own_target.complete(words)):
            hydra.main(version_base="1.3", config_path="pkg://gpipe_cli.conf", config_name=chosen.config_name)(task)()
    except KNOWN as error:
        raise ConfigurationError(explain(error, words, chosen.own_keys)) from error
    finally:
        if sweep.current is not None:
            codes.append(_end_sweep(sweep.current))
    return next((code for code in codes if code), 0) if sweep.current is None else codes[-1]


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
    print(f"\n{table}\n\n{where_it_is(finished.directory)}", file=OutputStream(sys.stdout), flush=True)
    return 0 if all_done else FAILED


if __name__ == "__main__":
    sys.exit(main())
