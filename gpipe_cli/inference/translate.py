"""Defines what every worker of `gpipe-translate` runs: it translates lines."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigurationError
from ..launch.context import Context
from ..trainer.assembly import assemble_decoder, assemble_from_checkpoint
from .lines import Answerer


def main(context: Context, config: dict[str, Any]) -> dict[str, int]:
    """Translates; the entry point of a worker.

    Args:
        config: as in `assemble_from_checkpoint`, and "input", the path of a pipe with UTF-8 lines.

    Returns:
        As `Answerer.answer_all`.

    Raises:
        ConfigurationError: the run's task or data cannot translate, or as `assemble_from_checkpoint`.
    """
    assembly = assemble_from_checkpoint(context, config)
    generation, settings = assembly.task.generation, assembly.settings
    if generation is None:
        raise ConfigurationError(f"task._target_={settings.task['_target_']} of this run generates no text")
    decoder, at_once = assemble_decoder(assembly, generation), generation.group * settings.pipeline.M
    return Answerer(context, assembly, decoder, at_once, beam=generation.beam).answer_all(config["input"])
