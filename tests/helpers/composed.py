"""Composes configurations as the commands do."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config import Checks
from gpipe_cli.jobs.job import Prepared, prepare
from gpipe_cli.jobs.limits import MACHINE


def composed(*words: str, of: str = "train") -> dict[str, Any]:
    """Returns the configuration with all references resolved; nothing is checked.

    Args:
        of: the file in conf/ that it begins with.
    """
    config = OmegaConf.to_container(_compose(words, of), resolve=True)
    assert isinstance(config, dict)
    return config  # type: ignore[return-value]  # its keys are texts


def checked(*words: str, of: str = "train", checks: Checks = MACHINE) -> Prepared:
    """Returns the configuration as a command passes it to its workers, or raises what the command refuses it with."""
    return prepare(_compose(words, of), words, checks)


def _compose(words: tuple[str, ...], of: str) -> DictConfig:
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        return compose(of, overrides=list(words))
