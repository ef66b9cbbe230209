"""Defines what every worker of `gpipe-generate` runs: it continues prompts with a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import SamplingSettings
from ..decoding.decoding import Decoder
from ..decoding.sampling import ContinuationForm, Prompt
from ..errors import ConfigurationError
from ..launch.context import Context
from ..trainer.assembly import Assembly, assemble_from_checkpoint
from .lines import Answerer


def main(context: Context, config: dict[str, Any]) -> dict[str, int]:
    """Generates; the entry point of a worker.

    Args:
        config: as in `assemble_from_checkpoint`, and "sampling", the fields of `SamplingSettings`; either "prompt", one
            text, or "input", the path of a pipe with UTF-8 lines.

    Returns:
        As `Answerer.answer_all`.

    Raises:
        ConfigurationError: the run's model or data cannot generate text, or as `assemble_from_checkpoint`.
    """
    assembly = assemble_from_checkpoint(context, config)
    continuer = Continuer(context, assembly, SamplingSettings(**config["sampling"]))
    if "prompt" not in config:
        return continuer.answer_all(config["input"])
    continuer.answer([config["prompt"]])
    return continuer.counts()


class Continuer(Answerer):
    """Continues prompts.

    Raises:
        ConfigurationError: the model is no language model.
    """

    def __init__(self, context: Context, assembly: Assembly, settings: SamplingSettings) -> None:
        shape = assembly.first.shape
        if shape.inputs != (2,) or len(shape.targets) != 1:
            raise ConfigurationError(
                f"this run's model reads inputs of {list(shape.inputs)} dimensions: generating text needs a language "
                "model, which reads token ids [rows, tokens] alone (gpipe-translate translates)"
            )
        self._eos = assembly.first.tokens.eos_id
        window = None if _keeps_caches(assembly) else assembly.world.broadcast(lambda: _window(assembly))
        decoder = Decoder(assembly.pipeline, ContinuationForm(settings, self._eos, window))
        super().__init__(context, assembly, decoder, assembly.settings.pipeline.M, settings.samples)

    def source(self, ids: Sequence[int], line: int, sample: int) -> Prompt:
        """Returns the line as the beginning of a document."""
        return Prompt([self._eos, *ids], line, sample)

    def answer_text(self, ids: Sequence[int], found: Sequence[int]) -> Sequence[int]:
        """Returns the line and what follows it."""
        return [*ids, *found]

    def is_blank(self, line: str) -> bool:
        """Returns False: an empty line begins a new text."""
        return False


def _keeps_caches(assembly: Assembly) -> bool:
    """Returns whether a layer of the model has `decode`; every worker calls it at the same time."""
    own = any(hasattr(layer.module, "decode") for cell in assembly.cells for layer in cell.layers)
    return any(assembly.world.all_gather(own))


def _window(assembly: Assembly) -> int:
    """Returns the tokens of a training example; on rank 0."""
    batch = next(iter(assembly.source.train(None, 1, 0, 1)))  # type: ignore[union-attr]  # rank 0 has the source
    return int(batch.micro_batches[0][0][0].shape[1])
