"""Composes configurations as the commands do."""

from typing import Any

from omegaconf import OmegaConf

from gpipe_cli.jobs import configuration
from gpipe_cli.jobs.configuration import Prepared, prepare


def composed(*words: str, of: str = "train") -> dict[str, Any]:
    """Returns the configuration with all references resolved; nothing is checked.

    Args:
        of: the file in conf/ that it begins with.
    """
    config = OmegaConf.to_container(configuration.composed(of, words), resolve=True)
    assert isinstance(config, dict)
    return config  # type: ignore[return-value]  # its keys are texts


def checked(*words: str, of: str = "train", trains: bool = False) -> Prepared:
    """Returns the configuration as a command passes it to its workers, or raises what the command refuses it with."""
    return prepare(configuration.composed(of, words), trains)
