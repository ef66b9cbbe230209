"""Defines what every worker of `gpipe-translate` runs: reads lines from a pipe and emits their translations, in order.

Only rank 0 reads and emits; an exchange passes on to the others whether there are more lines.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from ..decoding.beam import Hypothesis
from ..decoding.decoding import Decoder
from ..distributed.exchange import Exchange
from ..errors import ConfigurationError
from ..launch.context import Context
from .assembly import Assembly, assemble_decoder, assemble_from_checkpoint, generation_settings

TICK_SECONDS = 0.2  # between two checks whether to stop
LINGER_SECONDS = 0.05  # waits for more lines after the first: a larger batch is faster
MOST_TOKENS = 1024  # of a line, where no training sentence was longer: attention over more would fill the memory
IDLE_SECONDS = 60.0  # without a line; then all workers run an exchange, so that none times out waiting for rank 0


class TextCodec(Protocol):
    """Defines what translating calls of a data source."""

    def encode(self, texts: list[str]) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...


class PipeReader:
    """Reads lines from a pipe, as many as have arrived.

    Args:
        path: of the pipe; opening waits for its writer.
        stopped: whether to end reading.
        idle: called while nothing arrives, about every `TICK_SECONDS`.
    """

    def __init__(self, path: str, stopped: Callable[[], bool], idle: Callable[[], None]) -> None:
        self._pipe = os.open(path, os.O_RDONLY)
        self._stopped, self._idle = stopped, idle
        self._lines: list[str] = []
        self._rest = b""
        self._ended = False

    def read(self, most: int) -> list[str] | None:
        """Returns at most ``most`` lines; an empty list after `IDLE_SECONDS` without one; None at the end."""
        until = time.monotonic() + IDLE_SECONDS
        while not self._lines and not self._ended:
            if self._stopped():
                return None
            if not self._receive(TICK_SECONDS):
                self._idle()
                if time.monotonic() > until:
                    return []
        while len(self._lines) < most and not self._ended and self._receive(LINGER_SECONDS):
            pass
        lines, self._lines = self._lines[:most], self._lines[most:]
        return lines or None

    def _receive(self, seconds: float) -> bool:
        """Returns whether anything came within ``seconds``, the end included."""
        ready, _, _ = select.select([self._pipe], [], [], seconds)
        if not ready:
            return False
        received = os.read(self._pipe, 1 << 16)
        *lines, self._rest = (self._rest + received).split(b"\n")
        if not received:
            self._ended = True
            lines, self._rest = ([self._rest] if self._rest else []), b""
        self._lines += [line.decode() for line in lines]
        return True


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
    reader = None
    if assembly.world.rank == 0:
        reader = PipeReader(config["input"], context.stop_requested, lambda: context.emit({"kind": "idle"}))
    more = Exchange({"more": 1}, assembly.world.all_ranks)
    while True:
        lines = reader.read(translator.at_once) if reader is not None else None
        more.own["more"][0] = float(lines is not None)
        more.run()
        if not more.total["more"][0]:
            return {name: getattr(translator, name) for name in ("lines", "longer", "left_out", "most")}
        translator.translate(lines or [])


class Translator:
    """Translates lines; every worker calls `translate` at the same time.

    Args:
        emit: receives the translations, on rank 0.
        longest: tokens of the longest source of the training, end-of-sentence token included; None: not known.

    Raises:
        ConfigurationError: the task generates no text, or the data source has no `encode` and `decode`.
    """

    def __init__(self, assembly: Assembly, emit: Callable[[dict[str, Any]], None], longest: int | None) -> None:
        generation, settings, source = generation_settings(assembly.task), assembly.settings, assembly.source
        if generation is None:
            raise ConfigurationError(f"task._target_={settings.task['_target_']} of this run generates no text")
        lacking = [name for name in ("encode", "decode") if source is not None and not hasattr(source, name)]
        if lacking:
            raise ConfigurationError(
                f"data._target_={settings.data['_target_']} of this run has no method {lacking[0]}: translating needs "
                "encode(texts), token ids with their end-of-sentence token, and decode(ids)"
            )
        self._codec = cast("TextCodec | None", source)
        self._decoder: Decoder = assemble_decoder(assembly, generation)
        self._beam, self._emit, self._longest = generation.beam, emit, longest
        self.at_once = generation.group * settings.pipeline.M
        self.most = max(MOST_TOKENS, longest or 0)
        self.lines = self.longer = self.left_out = 0

    def translate(self, lines: list[str]) -> None:
        """Emits {"kind": "translations", "texts", "log_probabilities"}.

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
        texts = [" ".join(self._codec.decode(hypothesis.tokens).split("\n")) for hypothesis in hypotheses]
        log_probabilities = [hypothesis.log_probability for hypothesis in hypotheses]
        self._emit({"kind": "translations", "texts": texts, "log_probabilities": log_probabilities})
