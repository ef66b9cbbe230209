"""Beam search through the pipeline: one token per hypothesis and round, several groups of sentences in flight.

Every round runs the forward-only schedule once, a group being a micro-batch; layers remember what they need in caches
that stay with their cell. The worker of the last cell holds the search. Which hypotheses go on (each the child of a row
of the round before, with one more token) reaches everybody by one exchange, so all workers reorder their caches alike,
leave out sentences and groups that are done, and end together. Nothing depends on where the cells are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from ..distributed.batch_plan import BatchPlanCodec
from ..distributed.exchange import Exchange, never, run_unless_stopped
from ..distributed.world import World
from ..micro_batch import MicroBatch
from ..pipeline.engine import Pipeline
from ..schedule.run_schedules import RunSchedules
from ..tasks.base import GenerationSettings
from .beam import BeamSearch, Hypothesis

Caches = dict[tuple[int, int], list[dict[str, Any]]]  # by (cell, micro-batch), one dict a layer
Sources = Sequence[Sequence[int]]


class ScoringTask(Protocol):
    """What decoding needs of a task."""

    def log_probabilities(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class DecoderRuntime:
    """What runs groups of sentences.

    Attributes:
        groups: how many are in flight, at most: as many micro_batches as the codec's plans hold.
        stop_requested: of this worker, as it last heard.
    """

    world: World
    engine: Pipeline
    schedules: RunSchedules
    codec: BatchPlanCodec
    groups: int
    stop_requested: Callable[[], bool] = never


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that begin and end a sentence, and the one that is padding."""

    bos_id: int
    eos_id: int
    pad_id: int


@dataclass
class _Flight:
    """The groups of this replica that are still in flight.

    Attributes:
        groups: their numbers; one is a micro-batch of the next round, in this order.
        signatures: of the next round.
        micro_batches: of the next round, on the worker of cell 0; None elsewhere.
        searches: by group, on the worker of the last cell.
    """

    beam: int
    groups: list[int]
    signatures: tuple[tuple[object, ...], ...]
    micro_batches: list[MicroBatch] | None
    caches: Caches
    searches: dict[int, BeamSearch]


class Decoder:
    """Translates token sequences; every worker calls `decode` at the same time.

    Args:
        task: makes log-probabilities of the next token from the last cell's outputs.
    """

    def __init__(
        self, machinery: DecoderRuntime, task: ScoringTask, settings: GenerationSettings, marks: SpecialTokens
    ) -> None:
        self._machinery, self._world, self._task = machinery, machinery.world, task
        self._settings, self._marks = settings, marks
        replicas, groups, size = self._world.replicas, machinery.groups, settings.group
        self._rows_shape = (replicas, groups, size * settings.widest)
        self._sentences_shape = (replicas, groups, size)
        rows, sentences = (replicas * groups * size * each for each in (settings.widest, 1))
        everyone = self._world.all_ranks
        self._round = Exchange({**machinery.codec.fields(), "parents": rows, "tokens": rows, "stop": 1}, everyone)
        ends = {"lengths": sentences, "log_probabilities": sentences, "tokens": sentences * settings.max_length}
        self._end = Exchange(ends, everyone)

    def decode(self, sources: Sources, beam: int) -> list[Hypothesis]:
        """The translation of each source.

        Args:
            sources: token ids with their end-of-sentence token; the same on the first worker of each replica, which
                reads the data, and nothing elsewhere.
            beam: hypotheses of each sentence, at most `settings.widest`.

        Returns:
            One for each of `sources`: nothing on workers that gave none.

        Raises:
            StopRequested: somebody asked the run to stop.
        """
        batches = self._batches(sources)
        found: dict[int, Hypothesis] = {}
        replicas, replica = self._world.replicas, self._world.replica
        for turn in count():
            share = batches[turn * replicas : (turn + 1) * replicas]  # one batch a replica
            mine = share[replica] if replica < len(share) else []
            if not self._translate([[sources[i] for i in group] for group in mine], beam):
                break
            for number, groups in enumerate(share):
                found |= self._read_ends(number, groups)
        return [found[i] for i in range(len(sources))]

    def _batches(self, sources: Sources) -> list[list[list[int]]]:
        """Groups of similar length, by the numbers of their sources, as many in a batch as are in flight together."""
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        size, together = self._settings.group, self._machinery.groups
        groups = [order[first : first + size] for first in range(0, len(order), size)]
        return [groups[first : first + together] for first in range(0, len(groups), together)]

    # -- one batch ---------------------------------------------------------------------------------------------

    def _translate(self, groups: Sequence[Sources], beam: int) -> bool:
        """Translates one batch of groups into the exchange of the ends; False when no replica had any."""
        machinery, flight = self._machinery, self._take_off(groups, beam)
        if flight is None:
            return False
        searches = flight.searches
        while flight is not None:
            if flight.groups:
                instructions = machinery.schedules.forward_lists(len(flight.groups))[self._world.worker]
                sink = self._sink(flight)
                machinery.engine.run_forward(instructions, flight.signatures, flight.micro_batches, sink, flight.caches)
            run_unless_stopped(self._round, machinery.stop_requested)
            flight = self._next_round(flight)
        self._write_ends(searches)
        self._end.run()
        return True

    def _take_off(self, groups: Sequence[Sources], beam: int) -> _Flight | None:
        micro_batches = [self._first_part(group) for group in groups] if self._world.reads_data else None
        if micro_batches is not None:
            self._machinery.codec.write(self._round, micro_batches, [1.0] * len(micro_batches))
        run_unless_stopped(self._round, self._machinery.stop_requested)
        plan = self._machinery.codec.read(self._round, "generate")
        if plan.total_micro_batches == 0:
            return None
        return _Flight(beam, list(range(len(plan.signatures))), plan.signatures, micro_batches, {}, {})

    def _first_part(self, sources: Sources) -> MicroBatch:
        """Sources and first tokens; in the place of targets the longest length of each translation, for the search."""
        width = max(len(source) for source in sources)
        padded = torch.tensor([[*source, *[self._marks.pad_id] * (width - len(source))] for source in sources])
        first = torch.full((len(sources), 1), self._marks.bos_id)
        limits = torch.tensor([[self._settings.longest(len(source))] for source in sources])
        return (padded, first), (limits,)

    def _sink(self, flight: _Flight) -> Any:
        """What the worker of the last cell does with a group's outputs: one step of the search."""
        parents, tokens = (self._round.own[name].view(self._rows_shape) for name in ("parents", "tokens"))

        def advance(micro_batch: int, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
            group = flight.groups[micro_batch]
            if group not in flight.searches:
                exponent = self._settings.length_exponent
                flight.searches[group] = BeamSearch(targets[0][:, 0], flight.beam, exponent, self._marks.eos_id)
            going_on = flight.searches[group].advance(self._task.log_probabilities(outputs[0]))
            place = (self._world.replica, group, slice(0, len(going_on.parents)))
            parents[place] = (going_on.parents + 1).double()  # 0: nothing goes on here
            tokens[place] = going_on.tokens.double()

        return advance

    def _next_round(self, flight: _Flight) -> _Flight | None:
        """What goes on, as the exchange tells; None: nothing, in any replica."""
        parents, tokens = (self._round.total[name].view(self._rows_shape).long() for name in ("parents", "tokens"))
        if not bool(parents.any()):
            return None
        replica = self._world.replica
        rows = {group: int((parents[replica, group] > 0).sum()) for group in flight.groups}
        going_on = [(number, group) for number, group in enumerate(flight.groups) if rows[group]]
        chosen = [(number, parents[replica, group, : rows[group]] - 1) for number, group in going_on]
        micro_batches = [_later_part(tokens[replica, group, : rows[group], None]) for _, group in going_on]
        return _Flight(
            beam=flight.beam,
            groups=[group for _, group in going_on],
            signatures=tuple(("generate on", rows[group]) for _, group in going_on),
            micro_batches=micro_batches if self._world.reads_data else None,
            caches=reorder_caches(flight.caches, chosen, self._world.device),
            searches=flight.searches,
        )

    # -- its end -----------------------------------------------------------------------------------------------

    def _write_ends(self, searches: dict[int, BeamSearch]) -> None:
        lengths, totals, tokens = self._ends(self._end.own)
        for group, search in searches.items():
            for sentence, hypothesis in enumerate(search.best()):
                place, length = (self._world.replica, group, sentence), len(hypothesis.tokens)
                lengths[place], totals[place] = length, hypothesis.log_probability
                tokens[place][:length] = torch.tensor(hypothesis.tokens, dtype=torch.float64)

    def _ends(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths and log-probabilities, [replicas, groups, sentences], and tokens, [..., longest length]."""
        shape = self._sentences_shape
        numbers = fields["lengths"].view(shape), fields["log_probabilities"].view(shape)
        return *numbers, fields["tokens"].view(*shape, self._settings.max_length)

    def _read_ends(self, replica: int, groups: Sequence[Sequence[int]]) -> dict[int, Hypothesis]:
        """Number of the source to its translation."""
        lengths, totals, tokens = self._ends(self._end.total)
        found = {}
        for group, numbers in enumerate(groups):
            for sentence, number in enumerate(numbers):
                place = (replica, group, sentence)
                found[number] = Hypothesis(tokens[place][: int(lengths[place])].long().tolist(), float(totals[place]))
        return found


def reorder_caches(caches: Caches, chosen: Sequence[tuple[int, Tensor]], device: torch.device) -> Caches:
    """The caches of the next round, whose micro-batches hold other rows in another order.

    Every tensor in a layer's cache has one entry per row in its first dimension; whatever else stands there counts for
    all rows alike and stays.

    Args:
        chosen: for each micro-batch of the next round its number in this one, and which of its rows go on, [rows].
    """
    unchanged = [bool((rows == torch.arange(len(rows))).all()) for _, rows in chosen]
    moved = [rows.to(device) for _, rows in chosen]
    reordered: Caches = {}
    for (cell, micro_batch), layers in caches.items():
        for number, (before, _) in enumerate(chosen):
            if before != micro_batch:
                continue
            rows = moved[number]
            for cache in layers:
                for name, value in cache.items():
                    if isinstance(value, Tensor) and not (unchanged[number] and len(value) == len(rows)):
                        cache[name] = value.index_select(0, rows)
            reordered[cell, number] = layers
    return reordered


def _later_part(tokens: Tensor) -> MicroBatch:
    """One more token for each row, and no source; a target has to be there, and nobody looks at it."""
    return (tokens.new_zeros(len(tokens), 0), tokens), (tokens,)
