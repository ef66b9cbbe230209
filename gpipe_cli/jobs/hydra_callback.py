"""Defines what Hydra calls before the first job: it checks a single run, and records where a sweep is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.disk import DiskError
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import sweep, torchrun
from gpipe_cli.jobs.job import in_words, prepare
from gpipe_cli.jobs.limits import TRAINING
from gpipe_cli.terminal.frame import FAILED, REFUSED, one_screen, to_stderr
from gpipe_cli.terminal.hydra_errors import explain
from gpipe_cli.terminal.output import require_writable
from gpipe_cli.terminal.text import relative_paths


@contextmanager
def _exiting() -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, DiskError, OmegaConfBaseException) as error:
        text = explain(error, "hydra") if isinstance(error, OmegaConfBaseException) else str(error)
        if torchrun.is_first():
            to_stderr(one_screen(in_words(relative_paths(text))))
        raise SystemExit(FAILED if isinstance(error, DiskError) else REFUSED) from None


def _typed_words(config: DictConfig) -> list[str]:
    """Returns the overrides as they were typed; a `${…}` among them is not resolved here."""
    words = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


class CommandCallback(Callback):
    """Refuses a wrong single run before Hydra makes its directory; of a sweep, sets `sweep.current`."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Checks the configuration and the run directory.

        Raises:
            SystemExit: one of them is wrong. (Hydra turns any other exception of a callback into a warning.)
        """
        HydraConfig.instance().set_config(config)
        composed = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        with _exiting():
            prepare(composed, _typed_words(config), TRAINING)
            require_writable("hydra.run.dir", config.hydra.run.dir)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Makes the sweep's directory, and counts its jobs.

        Raises:
            SystemExit: the directory cannot be made.
        """
        with _exiting():
            require_writable("hydra.sweep.dir", config.hydra.sweep.dir)
        jobs = sweep.count_jobs(_typed_words(config))
        sweep.current = sweep.Sweep(Path(config.hydra.sweep.dir).absolute(), jobs)
        sweep.name_by_swept_keys(config)
