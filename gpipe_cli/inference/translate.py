"""Defines what every worker of `gpipe-translate` runs: it translates lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..decoding.beam import Hypothesis
from ..decoding.decoding import Decoder
from ..errors import ConfigurationError
from ..launch.context import Context
from ..trainer.assembly import Assembly, assemble_decoder, assemble_from_checkpoint
from .lines import MOST_TOKENS, answer_lines


def main(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """Translates; the entry point of a worker.

    Args:
        config: as in `assemble_from_checkpoint`, and "input", the path of a pipe with UTF-8 lines; optionally
            "longest", tokens of the longest source of the training.

    Returns:
        On rank 0 the number of lines, of those longer than any of the training ("longer"), and of those with more
        than "most" tokens ("left_out").

    Raises:
        ConfigurationError: the run's task or data cannot translate, or as `assemble_from_checkpoint`.
    """
    assembly = assemble_from_checkpoint(context, config)
    translator = Translator(assembly, context.emit, config.get("longest"))
    answer_lines(context, assembly, translator, config["input"])
    return {name: getattr(translator, name) for name in ("lines", "longer", "left_out", "most")}


class Translator:
    """Translates lines; an `Answerer`.

    Args:
        emit: receives the translations, on rank 0.
        longest: tokens of the longest source of the training, end-of-sentence token included; None: not known.

    Raises:
        ConfigurationError: the task generates no text, or the data source has no `encode` and `decode`.
    """

    def __init__(self, assembly: Assembly, emit: Callable[[dict[str, Any]], None], longest: int | None) -> None:
        generation, settings = assembly.task.generation, assembly.settings
        if generation is None:
            raise ConfigurationError(f"task._target_={settings.task['_target_']} of this run generates no text")
        self._codec = assembly.source
        self._decoder: Decoder = assemble_decoder(assembly, generation)
        self._beam, self._emit, self._longest = generation.beam, emit, longest
        self.at_once = generation.group * settings.pipeline.M
        self.most = max(MOST_TOKENS, longest or 0)
        self.lines = self.longer = self.left_out = 0

    def answer(self, lines: list[str]) -> None:
        """Emits {"kind": "answers", "lines", "texts", "log_probabilities"}.

        An empty line and one of too many tokens have an empty translation.
        """
        filled = [number for number, line in enumerate(lines) if line.strip()]
        sources = self._codec.encode([lines[number] for number in filled]) if self._codec is not None else []
        short = {number: ids for number, ids in zip(filled, sources, strict=True) if len(ids) <= self.most}
        found = dict(zip(short, self._decoder.decode(list(short.values()), self._beam), strict=True))
        if self._codec is None or not lines:
            return
        self.lines += len(lines)
        self.left_out += len(filled) - len(short)
        self.longer += sum(self._longest is not None and len(ids) > self._longest for ids in sources)
        hypotheses = [found.get(number, Hypothesis([], 0.0)) for number in range(len(lines))]
        texts = [self._codec.decode(hypothesis.tokens) for hypothesis in hypotheses]
        log_probabilities = [hypothesis.log_probability for hypothesis in hypotheses]
        self._emit({"kind": "answers", "lines": len(lines), "texts": texts, "log_probabilities": log_probabilities})
