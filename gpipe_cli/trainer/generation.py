"""Greedy translation through the pipeline: one token per sentence and round, several groups of sentences in flight.

Every round runs the forward-only schedule once with one target token per sentence; layers remember what they need in
caches that stay with their cell. The tokens that the last worker chose reach everybody with the plan of the next round,
so all workers see the same sentences end at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from ..pipeline.engine import Pipeline
from ..tasks.generation import GenerationSettings
from .exchange import Exchange
from .plan import Part, PlanCodec
from .programs import Programs
from .world import World


class Sentence(Protocol):
    """One sentence to translate."""

    language: str
    source: str
    reference: str
    source_ids: Sequence[int]


class TextSource(Protocol):
    """What generation needs of a data source, beside batches."""

    pad_id: int
    bos_id: int
    eos_id: int

    def held_out(self, split: str, per_language: int) -> Sequence[Sentence]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class GeneratingTask(Protocol):
    """What generation needs of a task."""

    def next_tokens(self, logits: Tensor) -> Tensor: ...

    def score(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]: ...


@dataclass(frozen=True)
class Sample:
    """A sentence, its reference and what the model made of it."""

    language: str
    source: str
    reference: str
    output: str

    def as_markdown(self) -> str:
        return f"**{self.language}** {self.source}\n\n* reference: {self.reference}\n* output: {self.output}"


Groups = list[list[int]]  # sentence numbers of each group of one batch


class Generator:
    """Translates held-out sentences; every worker calls `evaluate` at the same step.

    Args:
        source: on the first worker of each replica, None elsewhere.
        groups: how many are in flight, at most.
        samples: how many outputs are shown.
        bos_id, eos_id: the tokens that begin and end a sentence.
    """

    def __init__(
        self,
        world: World,
        source: TextSource | None,
        task: GeneratingTask,
        engine: Pipeline,
        programs: Programs,
        exchange: Exchange,
        codec: PlanCodec,
        groups: int,
        settings: GenerationSettings,
        samples: int,
        bos_id: int,
        eos_id: int,
    ) -> None:
        self._world, self._source, self._task = world, source, task
        self._engine, self._programs, self._exchange, self._codec = engine, programs, exchange, codec
        self._groups, self._settings, self._samples = groups, settings, samples
        self._bos, self._eos = bos_id, eos_id

    @staticmethod
    def fields(replicas: int, groups: int, settings: GenerationSettings) -> dict[str, int]:
        """The exchange's fields: the token that each sentence in flight got, plus one; 0 where there is none."""
        return {"tokens": replicas * groups * settings.group}

    def evaluate(self, final: bool) -> tuple[dict[str, float], list[Sample]]:
        """(scores, samples) on rank 0, nothing elsewhere."""
        world = self._world
        per_language = self._settings.per_language_at_end if final else self._settings.per_language
        sentences = list(self._source.held_out("dev", per_language)) if self._source is not None else []
        batches = self._batches(sentences)
        outputs: dict[int, list[int]] = {}
        for turn in count():
            share = batches[turn * world.replicas : (turn + 1) * world.replicas]  # one batch a replica
            mine = share[world.replica] if world.replica < len(share) else []
            sources = [self._pad([sentences[i].source_ids for i in group]) for group in mine]
            tokens = self._translate(sources)
            if tokens is None:
                break
            for replica, groups in enumerate(share):
                outputs |= self._read_outputs(groups, tokens[replica])
        if world.rank != 0 or self._source is None:
            return {}, []
        texts = [self._source.decode(outputs[i]) for i in range(len(sentences))]
        shown = _spread(len(sentences), self._samples)
        samples = [Sample(sentences[i].language, sentences[i].source, sentences[i].reference, texts[i]) for i in shown]
        return self._task.score(texts, [sentence.reference for sentence in sentences]), samples

    def _batches(self, sentences: Sequence[Sentence]) -> list[Groups]:
        """Groups of similar length, as many in a batch as are in flight together."""
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i].source_ids))
        size = self._settings.group
        groups = [order[first : first + size] for first in range(0, len(order), size)]
        return [groups[first : first + self._groups] for first in range(0, len(groups), self._groups)]

    def _pad(self, rows: Sequence[Sequence[int]]) -> Tensor:
        assert self._source is not None
        width = max(len(row) for row in rows)
        return torch.tensor([[*row, *[self._source.pad_id] * (width - len(row))] for row in rows])

    def _translate(self, sources: list[Tensor]) -> Tensor | None:
        """Token ids, shape (replicas, groups, sentences, rounds), −1 where there is none; None: nothing was left."""
        slots = (self._world.replicas, self._groups, self._settings.group)
        tokens = [torch.full((len(source), 1), self._bos) for source in sources]
        parts = self._announce(sources, tokens)
        self._exchange.run()
        plan = self._codec.read(self._exchange, "generate")
        if plan.total_parts == 0:
            return None
        chosen: list[Tensor] = []
        ended = torch.zeros(slots, dtype=torch.bool)
        caches: dict[tuple[int, int], list[dict[str, Any]]] = {}
        while not bool(ended.all()) and len(chosen) < self._settings.max_length:
            if plan.signatures:
                program = self._programs.forward(len(plan.signatures))[self._world.worker]
                self._engine.run_forward(program, plan.signatures, parts, self._choose, caches)
            self._announce([source[:, :0] for source in sources], tokens)  # shapes only: the tokens come with it
            self._exchange.run()
            plan = self._codec.read(self._exchange, "generate")
            chosen.append(self._exchange.all["tokens"].view(slots).long() - 1)
            ended |= (chosen[-1] < 0) | (chosen[-1] == self._eos)
            tokens = [chosen[-1][self._world.replica, g, : len(s), None] for g, s in enumerate(sources)]
            parts = _parts([source[:, :0] for source in sources], tokens)
        return torch.stack(chosen, dim=-1)

    def _announce(self, sources: list[Tensor], tokens: list[Tensor]) -> list[Part] | None:
        if not self._world.reads_data:
            return None
        parts = _parts(sources, tokens)
        self._codec.write(self._exchange, parts, [1.0] * len(parts))
        return parts

    def _choose(self, micro_batch: int, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
        tokens = self._task.next_tokens(outputs[0]).cpu()
        slots = self._exchange.mine["tokens"].view(self._world.replicas, self._groups, self._settings.group)
        slots[self._world.replica, micro_batch, : len(tokens)] = (tokens + 1).double()

    def _read_outputs(self, groups: Groups, tokens: Tensor) -> dict[int, list[int]]:
        """Sentence number to its tokens before the end-of-sentence token."""
        rows: dict[int, list[int]] = {}
        for group, sentences in zip(tokens.tolist(), groups, strict=False):
            for ids, number in zip(group, sentences, strict=False):
                rows[number] = ids[: ids.index(self._eos)] if self._eos in ids else ids
        return rows


def _parts(sources: list[Tensor], tokens: list[Tensor]) -> list[Part]:
    """Micro-batches of generation; targets have to be there, and nobody looks at them."""
    return [((source, token), (token,)) for source, token in zip(sources, tokens, strict=True)]


def _spread(count: int, wanted: int) -> list[int]:
    """``wanted`` numbers below ``count``, evenly spread."""
    wanted = min(count, wanted)
    return [i * count // wanted for i in range(wanted)]
