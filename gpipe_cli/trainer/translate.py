"""What every worker of `gpipe-translate` runs: lines in from a pipe, translations out as events, in order.

Only rank 0 reads and speaks; the others learn from an exchange whether more is to come.
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
from ..tasks.base import GenerationSettings
from .assembly import Assembly, assemble_decoder, generation_settings
from .from_checkpoint import assemble_from_checkpoint

TICK_SECONDS = 0.2  # between looks at whether to stop
LINGER_SECONDS = 0.05  # for more lines behind the first: a larger batch is faster
PATIENCE_SECONDS = 60.0  # without a line; then all workers meet, so that none gives up waiting for rank 0


class TextSource(Protocol):
    """What translating needs of a data source."""

    def encode(self, texts: list[str]) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...


class LineReader:
    """Lines from a pipe, as many as have arrived.

    Args:
        path: of the pipe; opening waits for its writer.
        stopped: whether reading shall end.
        idle: called while nothing arrives, about every `TICK_SECONDS`.
    """

    def __init__(self, path: str, stopped: Callable[[], bool], idle: Callable[[], None]) -> None:
        self._pipe = os.open(path, os.O_RDONLY)
        self._stopped, self._idle = stopped, idle
        self._lines: list[str] = []
        self._rest = b""
        self._ended = False

    def read(self, most: int) -> list[str] | None:
        """At most ``most`` lines; an empty list if none came for long; None at the end, or when told to stop."""
        until = time.monotonic() + PATIENCE_SECONDS
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
        """Whether anything came within ``seconds``, its end included."""
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
    """One worker's life.

    Args:
        config: as `assemble_from_checkpoint` wants it, and "input", the path of a pipe with UTF-8 lines.

    Returns:
        On rank 0 the number of lines, and of those with more tokens than any of the training ("longer").

    Raises:
        ConfigurationError: the run's task or data cannot translate, or as `assemble_from_checkpoint`.
    """
    assembly = assemble_from_checkpoint(context, config)
    generation = generation_settings(assembly.task)
    if generation is None:
        raise ConfigurationError(f"task._target_={assembly.settings.task['_target_']} of this run generates no text")
    refuse_source_without_text(assembly)
    translator = Translator(assembly, generation, context.emit, config.get("longest"))
    reader = None
    if assembly.world.rank == 0:
        reader = LineReader(config["input"], context.stop_requested, lambda: context.emit({"kind": "idle"}))
    more = Exchange({"more": 1}, assembly.world.all_ranks)
    while True:
        lines = reader.read(translator.at_once) if reader is not None else None
        more.own["more"][0] = float(lines is not None)
        more.run()
        if not more.total["more"][0]:
            return {"lines": translator.lines, "longer": translator.longer}
        translator.translate(lines or [])


def refuse_source_without_text(assembly: Assembly) -> None:
    """Raises ConfigurationError for a data source of the user's that knows no texts."""
    source = assembly.source
    lacking = [name for name in ("encode", "decode") if source is not None and not hasattr(source, name)]
    if lacking:
        raise ConfigurationError(
            f"data._target_={assembly.settings.data['_target_']} of this run has no method {lacking[0]}: translating "
            "needs encode(texts), token ids with their end mark, and decode(ids)"
        )


class Translator:
    """Lines to translations; every worker calls `translate` at the same time.

    Args:
        emit: where translations go, on rank 0.
        longest: tokens of the longest source of the training, end mark included; None: not known.
    """

    def __init__(
        self,
        assembly: Assembly,
        generation: GenerationSettings,
        emit: Callable[[dict[str, Any]], None],
        longest: int | None,
    ) -> None:
        self._source = cast("TextSource | None", assembly.source)
        self._decoder: Decoder = assemble_decoder(assembly, generation)
        self._beam, self._emit, self._longest = generation.beam, emit, longest
        self.at_once = generation.group * assembly.settings.pipeline.M
        self.lines = self.longer = 0

    def translate(self, lines: list[str]) -> None:
        """Emits {"kind": "translations", "texts", "log_probabilities"}; an empty line has an empty translation."""
        said = [number for number, line in enumerate(lines) if line.strip()]
        sources = self._source.encode([lines[number] for number in said]) if self._source is not None else []
        found = dict(zip(said, self._decoder.decode(sources, self._beam), strict=True))
        if self._source is None or not lines:
            return
        self.lines += len(lines)
        self.longer += sum(self._longest is not None and len(ids) > self._longest for ids in sources)
        nothing = Hypothesis([], 0.0)
        hypotheses = [found.get(number, nothing) for number in range(len(lines))]
        texts = [" ".join(self._source.decode(hypothesis.tokens).split("\n")) for hypothesis in hypotheses]
        totals = [hypothesis.log_probability for hypothesis in hypotheses]
        self._emit({"kind": "translations", "texts": texts, "log_probabilities": totals})
