"""Defines what every worker of `gpipe-generate` runs: it continues prompts with a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..decoding.decoding import Decoder
from ..decoding.sampling import ContinuationForm, Prompt, SamplingSettings
from ..errors import ConfigurationError
from ..launch.context import Context
from ..trainer.assembly import Assembly, assemble_from_checkpoint
from .lines import MOST_TOKENS, answer_lines


def main(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Generates; the entry point of a worker.

    Args:
        config: as in `assemble_from_checkpoint`, and "sampling", the fields of `SamplingSettings`; either "prompt", one
            text, or "input", the path of a pipe with UTF-8 lines.

    Returns:
        On rank 0 the number of prompts ("lines") and of those with more than "most" tokens ("left_out").

    Raises:
        ConfigurationError: the run's model or data cannot generate text, or as `assemble_from_checkpoint`.
    """
    assembly = assemble_from_checkpoint(context, config)
    continuer = Continuer(assembly, SamplingSettings(**config["sampling"]), context.emit)
    if "prompt" in config:
        continuer.answer([config["prompt"]])
    else:
        answer_lines(context, assembly, continuer, config["input"])
    return {name: getattr(continuer, name) for name in ("lines", "left_out", "most")}


class Continuer:
    """Continues prompts; an `Answerer`.

    Args:
        emit: receives the texts, on rank 0.

    Raises:
        ConfigurationError: the model is no language model, or the data source has no `encode` and `decode`.
    """

    def __init__(self, assembly: Assembly, settings: SamplingSettings, emit: Callable[[dict[str, Any]], None]) -> None:
        shape = assembly.shape
        if len(shape.inputs) != 1 or shape.inputs != (2,) or len(shape.targets) != 1:
            raise ConfigurationError(
                f"this run's model reads inputs of {list(shape.inputs)} dimensions: generating text needs a language "
                "model, which reads token ids [rows, tokens] alone (gpipe-translate translates)"
            )
        self._codec, self._settings, self._emit = assembly.source, settings, emit
        self._eos = assembly.tokens.eos_id
        window = None if _keeps_caches(assembly) else assembly.world.broadcast(lambda: _window(assembly))
        self._decoder = Decoder(assembly.pipeline, ContinuationForm(settings, self._eos, window))
        self.at_once = assembly.settings.pipeline.M
        self.most, self.lines, self.left_out = MOST_TOKENS, 0, 0

    def answer(self, lines: list[str]) -> None:
        """Emits {"kind": "answers", "lines", "texts", "log_probabilities"}: as many texts as samples for each line.

        A prompt of too many tokens has empty texts.
        """
        encoded = self._codec.encode(lines) if self._codec is not None else []
        numbered = enumerate(encoded, start=self.lines)
        prompts = [
            Prompt([self._eos, *ids], number, sample)
            for number, ids in numbered
            if len(ids) < self.most
            for sample in range(self._settings.samples)
        ]
        found = self._decoder.decode(prompts)
        if self._codec is None or not lines:
            return
        given = {(p.number, p.sample): ([*p.ids[1:], *h.tokens], h) for p, h in zip(prompts, found, strict=True)}
        texts, log_probabilities = list[str](), list[float]()
        for number in range(self.lines, self.lines + len(lines)):
            for sample in range(self._settings.samples):
                ids, hypothesis = given.get((number, sample), ([], None))
                texts.append(self._codec.decode(ids))
                log_probabilities.append(0.0 if hypothesis is None else hypothesis.log_probability)
        self.lines += len(lines)
        self.left_out += sum(len(ids) >= self.most for ids in encoded)
        self._emit({"kind": "answers", "lines": len(lines), "texts": texts, "log_probabilities": log_probabilities})


def _keeps_caches(assembly: Assembly) -> bool:
    """Returns whether a layer of the model has `decode`; every worker calls it at the same time."""
    own = any(hasattr(layer.module, "decode") for cell in assembly.cells for layer in cell.layers)
    return any(assembly.world.all_gather(own))


def _window(assembly: Assembly) -> int:
    """Returns the tokens of a training example; on rank 0."""
    batch = next(iter(assembly.source.train(None, 1, 0, 1)))  # type: ignore[union-attr]  # rank 0 has the source
    return int(batch.micro_batches[0][0][0].shape[1])
