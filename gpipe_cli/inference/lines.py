"""Translates or continues the lines of a pipe, in order; runs in every worker of gpipe-translate and gpipe-generate.

Only rank 0 reads lines and emits texts. It tells the others whether there are more lines.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from ..config import SamplingSettings
from ..decoding.beam import Hypothesis
from ..decoding.decoding import Decoder
from ..decoding.sampling import ContinuationForm, Prompt
from ..errors import ConfigurationError
from ..launch.context import Context
from ..trainer.assembly import Assembly, assemble_decoder, assemble_from_checkpoint

TICK_SECONDS = 0.2  # between two checks whether to stop
LINGER_SECONDS = 0.05  # waits for more lines after the first: a larger batch is faster
MOST_TOKENS = 1024  # of a line: attention over more would fill the memory
MOST_WAITING = 10_000  # lines that are read ahead
IDLE_SECONDS = 60.0  # without a line; then all workers run an empty call, so that none times out waiting for rank 0


def translate(context: Context, config: dict[str, Any]) -> dict[str, int]:
    """Translates the lines; the entry point of a worker.

    Args:
        config: keys of `assemble_from_checkpoint`, and "input", the path of a pipe with UTF-8 lines.

    Returns:
        As `Answerer.counts`.

    Raises:
        ConfigurationError: the run's task or data cannot translate, or as `assemble_from_checkpoint`.
    """
    assembly = assemble_from_checkpoint(context, config)
    generation, settings = assembly.pipeline.task.generation, assembly.settings
    if generation is None:
        raise ConfigurationError(f"task._target_={settings.task['_target_']} of this run generates no text")
    answerer = Answerer(context, assembly, assemble_decoder(assembly, generation), beam=generation.beam)
    return answerer.answer_all(config, generation.group * settings.pipeline.M)


def generate(context: Context, config: dict[str, Any]) -> dict[str, int]:
    """Continues the prompts; the entry point of a worker.

    Args:
        config: keys of `assemble_from_checkpoint`, and "sampling", the fields of `SamplingSettings`; either "prompt",
            one text, or "input", the path of a pipe with UTF-8 lines.

    Returns:
        As `Answerer.counts`.

    Raises:
        ConfigurationError: the run's model or data cannot generate text, or as `assemble_from_checkpoint`.
    """
    assembly, sampling = assemble_from_checkpoint(context, config), SamplingSettings(**config["sampling"])
    shape, eos = assembly.pipeline.shape, assembly.tokens.eos_id
    if shape.inputs != (2,) or len(shape.targets) != 1:
        raise ConfigurationError(
            f"this run's model reads inputs of {list(shape.inputs)} dimensions: generating text needs a language "
            "model, which reads token ids [rows, tokens] alone (gpipe-translate translates)"
        )
    keeps_caches = any(hasattr(layer.module, "decode") for layer in assembly.pipeline.layers)
    any_keeps = any(assembly.world.all_gather(keeps_caches))
    window = None if any_keeps else assembly.world.broadcast(lambda: _window(assembly))
    decoder = Decoder(assembly.pipeline, ContinuationForm(sampling, eos, window))
    answerer = Answerer(context, assembly, decoder, samples=sampling.samples, begin=eos)
    return answerer.answer_all(config, assembly.settings.pipeline.M)


def _window(assembly: Assembly) -> int:
    """Returns the number of tokens of a training example; only for rank 0, which has the data source."""
    batch = next(iter(assembly.source.train(None, 1, 0, 1)))  # type: ignore[union-attr]  # rank 0 has the source
    return int(batch.micro_batches[0][0][0].shape[1])


@dataclass
class Answerer:
    """Translates or continues lines with a decoder; every worker calls its methods at the same time.

    Attributes:
        beam: width of the beam.
        samples: number of texts for each line.
        begin: the token before a line that is continued; None: lines are translated, and blank ones have no text.
        counts: numbers on rank 0, of "lines", of lines left out because they have more than "most" tokens ("left_out"),
            and of texts that reached the longest length without an end ("cut").
    """

    context: Context
    assembly: Assembly
    decoder: Decoder
    beam: int = 1
    samples: int = 1
    begin: int | None = None
    counts: dict[str, int] = field(default_factory=lambda: {"lines": 0, "left_out": 0, "most": MOST_TOKENS, "cut": 0})

    def answer_all(self, config: Mapping[str, Any], at_once: int) -> dict[str, int]:
        """Answers one prompt or all lines of a pipe; returns `counts`.

        Args:
            config: "prompt", one text, or "input", the path of a pipe with UTF-8 lines.
            at_once: most lines that are answered together.
        """
        if "prompt" in config:
            self.answer([config["prompt"]])
            return self.counts
        reader = PipeReader(config["input"], self.context.stop_requested) if self.assembly.world.rank == 0 else None
        while True:
            lines = reader.read(at_once) if reader is not None else None
            if not self.assembly.world.broadcast(partial(bool, lines is not None)):
                return self.counts
            self.answer(lines or [])

    def answer(self, lines: list[str]) -> None:
        """Answers lines and emits {"kind": "answers", "texts", "log_probabilities"}, `samples` texts for each line.

        Lines with more than `MOST_TOKENS` tokens get empty texts.

        Args:
            lines: the lines on rank 0; empty elsewhere.
        """
        codec = self.assembly.source
        encoded = [] if codec is None else codec.encode(lines)
        # Number of a line -> its token ids; a blank line is not translated, but it may be continued.
        asked = {n: ids for n, ids in enumerate(encoded) if self.begin is not None or lines[n].strip()}
        places = [(n, sample) for n, ids in asked.items() if len(ids) <= MOST_TOKENS for sample in range(self.samples)]
        found = self.decoder.decode([self._source(asked[n], n, sample) for n, sample in places], self.beam)
        if codec is None or not lines:
            return
        self.counts["lines"] += len(lines)
        self.counts["cut"] += sum(hypothesis.cut for hypothesis in found)
        self.counts["left_out"] += sum(len(ids) > MOST_TOKENS for ids in asked.values())
        known, texts, log_probabilities = dict(zip(places, found, strict=True)), list[str](), list[float]()
        for n, sample in product(range(len(lines)), range(self.samples)):
            hypothesis = known.get((n, sample), Hypothesis([], 0.0))
            before = asked[n] if self.begin is not None and (n, sample) in known else []
            # A prompt may hold end tokens, as a conversation whose turns end; the text stops at one behind the prompt.
            after = [len(before)] if codec.eos_id in before else []
            texts.append(codec.decode([*before, *hypothesis.tokens], *after))
            log_probabilities.append(hypothesis.log_probability)
        self.context.emit({"kind": "answers", "texts": texts, "log_probabilities": log_probabilities})

    def _source(self, ids: Sequence[int], line: int, sample: int) -> Any:
        """Returns what the decoder reads: the ids of a line to translate, or a `Prompt` to continue.

        Args:
            ids: token ids of the line.
            line: number of the line in this call. A prompt gets its number among all calls, which seeds its draws.
            sample: number of the text among those of the line.
        """
        return ids if self.begin is None else Prompt([self.begin, *ids], self.counts["lines"] + line, sample)


class PipeReader:
    """Reads lines from a pipe, as many as have arrived.

    Args:
        path: path of the pipe.
        stopped: returns True when reading is to end.
    """

    def __init__(self, path: str, stopped: Callable[[], bool]) -> None:
        self._stopped, self._ended = stopped, False
        self._lines: Queue[str | None] = Queue(MOST_WAITING)  # None: the end
        Thread(target=self._fill, args=(path,), daemon=True).start()

    def _fill(self, path: str) -> None:
        """Reads the pipe's lines into the queue, and None at the end; runs in a thread."""
        with Path(path).open(encoding="utf-8", newline="\n") as pipe:
            for line in pipe:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def read(self, most: int) -> list[str] | None:
        """Returns at most ``most`` lines.

        The list is empty after `IDLE_SECONDS` without a line. None means the end of the pipe, or that the worker is to
        stop.
        """
        lines, until = list[str](), time.monotonic() + IDLE_SECONDS
        while len(lines) < most and not self._ended:
            try:
                line = self._lines.get(timeout=LINGER_SECONDS if lines else TICK_SECONDS)
            except Empty:
                if lines:
                    break
                if self._stopped():
                    return None
                if time.monotonic() > until:
                    return []
                continue
            if line is None:
                self._ended = True
            else:
                lines.append(line)
        return lines or None
