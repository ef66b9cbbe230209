"""Answers lines with text, in every worker of gpipe-translate and gpipe-generate: from a pipe, in order.

Only rank 0 reads and emits; an exchange passes on to the others whether there are more lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from ..config import SamplingSettings
from ..decoding.beam import Hypothesis
from ..decoding.decoding import Decoder
from ..decoding.sampling import ContinuationForm, Prompt
from ..distributed.exchange import Exchange
from ..errors import ConfigurationError
from ..launch.context import Context
from ..trainer.assembly import Assembly, assemble_decoder, assemble_from_checkpoint

TICK_SECONDS = 0.2  # between two checks whether to stop
LINGER_SECONDS = 0.05  # waits for more lines after the first: a larger batch is faster
MOST_TOKENS = 1024  # of a line: attention over more would fill the memory
MOST_WAITING = 10_000  # lines that are read ahead
IDLE_SECONDS = 60.0  # without a line; then all workers run an exchange, so that none times out waiting for rank 0


def translate(context: Context, config: dict[str, Any]) -> dict[str, int]:
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


def generate(context: Context, config: dict[str, Any]) -> dict[str, int]:
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


class Answerer:
    """Answers lines with a decoder; every worker calls its methods at the same time.

    Args:
        at_once: lines that are answered together, at most.
        samples: answers to each line.
        beam: of the decoder.
    """

    def __init__(
        self, context: Context, assembly: Assembly, decoder: Decoder, at_once: int, samples: int = 1, beam: int = 1
    ) -> None:
        self._context, self._assembly, self._codec = context, assembly, assembly.source
        self._decoder, self._at_once, self._samples, self._beam = decoder, at_once, samples, beam
        self._lines = self._left_out = 0

    def source(self, ids: Sequence[int], line: int, sample: int) -> Any:
        """Returns what the decoder continues, from the tokens of a line."""
        return ids

    def answer_text(self, ids: Sequence[int], found: Sequence[int]) -> Sequence[int]:
        """Returns the tokens of an answer, from those of the line and what the decoder has found."""
        return found

    def is_blank(self, line: str) -> bool:
        """Returns whether the answer to a line is empty."""
        return not line.strip()

    def answer_all(self, pipe: str) -> dict[str, int]:
        """Answers all lines of a pipe.

        Args:
            pipe: its path; its lines are UTF-8.

        Returns:
            On rank 0 the number of "lines" and of those with more than "most" tokens ("left_out").
        """
        reader = None
        if self._assembly.world.rank == 0:
            idle = {"kind": "idle"}
            reader = PipeReader(pipe, self._context.stop_requested, lambda: self._context.emit(idle))
        more = Exchange({"more": 1}, self._assembly.world.all_ranks)
        while True:
            lines = reader.read(self._at_once) if reader is not None else None
            more.own["more"][0] = float(lines is not None)
            more.run()
            if not more.total["more"][0]:
                return self.counts()
            self.answer(lines or [])

    def counts(self) -> dict[str, int]:
        """Returns what `answer_all` does, of the lines answered so far."""
        return {"lines": self._lines, "left_out": self._left_out, "most": MOST_TOKENS}

    def answer(self, lines: list[str]) -> None:
        """Emits {"kind": "answers", "texts", "log_probabilities"}: as many texts as samples for each line of rank 0.

        A blank line and one of too many tokens have empty texts.
        """
        encoded = [] if self._codec is None else self._codec.encode(lines)
        asked = {number: ids for number, ids in enumerate(encoded) if not self.is_blank(lines[number])}
        places = [
            (number, sample)
            for number, ids in asked.items()
            if len(ids) <= MOST_TOKENS
            for sample in range(self._samples)
        ]
        sources = [self.source(asked[number], self._lines + number, sample) for number, sample in places]
        found = dict(zip(places, self._decoder.decode(sources, self._beam), strict=True))
        if self._codec is None or not lines:
            return
        self._lines += len(lines)
        self._left_out += sum(len(ids) > MOST_TOKENS for ids in asked.values())
        texts, log_probabilities = list[str](), list[float]()
        for place in ((number, sample) for number in range(len(lines)) for sample in range(self._samples)):
            hypothesis = found.get(place, Hypothesis([], 0.0))
            ids = self.answer_text(asked[place[0]], hypothesis.tokens) if place in found else []
            texts.append(self._codec.decode(ids))
            log_probabilities.append(hypothesis.log_probability)
        self._context.emit({"kind": "answers", "texts": texts, "log_probabilities": log_probabilities})


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


class PipeReader:
    """Reads lines from a pipe, as many as have arrived.

    Args:
        path: of the pipe.
        stopped: whether to end reading.
        idle: called while nothing arrives, about every `TICK_SECONDS`.
    """

    def __init__(self, path: str, stopped: Callable[[], bool], idle: Callable[[], None]) -> None:
        self._stopped, self._idle, self._ended = stopped, idle, False
        self._lines: Queue[str | None] = Queue(MOST_WAITING)  # None: the end
        Thread(target=self._fill, args=(path,), daemon=True).start()

    def _fill(self, path: str) -> None:
        with Path(path).open(encoding="utf-8", newline="\n") as pipe:
            for line in pipe:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def read(self, most: int) -> list[str] | None:
        """Returns at most ``most`` lines; an empty list after `IDLE_SECONDS` without one; None at the end."""
        lines, until = list[str](), time.monotonic() + IDLE_SECONDS
        while len(lines) < most and not self._ended:
            try:
                line = self._lines.get(timeout=LINGER_SECONDS if lines else TICK_SECONDS)
            except Empty:
                if lines:
                    break
                if self._stopped():
                    return None
                self._idle()
                if time.monotonic() > until:
                    return []
                continue
            if line is None:
                self._ended = True
            else:
                lines.append(line)
        return lines or None
