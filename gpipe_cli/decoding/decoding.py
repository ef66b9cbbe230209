"""Generates through the pipeline: one token per row and round, several groups of sources in flight.

Each round runs the forward-only schedule once; a group of sources is a micro-batch. The worker of the last cell holds
the search. One exchange after each round distributes which rows go on (parent row and next token), so that all workers
reorder the caches of their layers alike, drop finished rows and groups, and end together.
The result does not depend on where the cells are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..distributed.pipeline import WorkerPipeline
from ..distributed.step_message import PlanMessage
from ..micro_batch import MicroBatch, Tensors
from ..pipeline.engine import Caches
from ..pipeline.step import StepPlan
from ..tasks.base import GenerationSettings, Task
from .beam import BeamSearch, Hypothesis
from .sampling import ContinuationForm, Sampling

Sources = Sequence[Any]
"""Token ids of sentences to translate, or `Prompt`s to continue; `len` of one is its number of tokens."""


@dataclass(frozen=True)
class SpecialTokens:
    """Holds the ids of the tokens that begin and end a sentence, and of padding."""

    bos_id: int
    eos_id: int
    pad_id: int


class TranslationForm:
    """Decodes sources, token ids with their end-of-sentence token, by beam search; a `Form`.

    Args:
        task: computes the log-probabilities of the next token from the last cell's outputs.

    Attributes:
        group: number of sentences that are decoded together.
        width: the most rows that a sentence has, the larger of the two beams.
    """

    uses_caches = True

    def __init__(self, task: Task, settings: GenerationSettings, tokens: SpecialTokens) -> None:
        self.task, self.settings, self.tokens = task, settings, tokens
        self.group, self.width = settings.group, max(settings.beam, settings.beam_during_run)

    def first(self, sources: Sequence[Sequence[int]]) -> MicroBatch:
        """Returns a group's first micro-batch: padded sources and first tokens as inputs.

        The targets are the longest length of each translation in tokens, int64 [sentences, 1].
        """
        width = max(len(source) for source in sources)
        padded = torch.tensor([[*source, *[self.tokens.pad_id] * (width - len(source))] for source in sources])
        first = torch.full((len(sources), 1), self.tokens.bos_id)
        limits = torch.tensor([[self.settings.longest(len(source))] for source in sources])
        return (padded, first), (limits,)

    def later(self, before: MicroBatch, parents: Tensor, tokens: Tensor) -> MicroBatch:
        """Returns a group's next micro-batch: an empty source and one token for each row; its targets are not used."""
        return (tokens.new_zeros(len(tokens), 0), tokens[:, None]), (tokens[:, None],)

    def search(self, targets: Tensors, beam: int) -> BeamSearch:
        """Returns a beam search up to the longest lengths."""
        return BeamSearch(targets[0][:, 0], beam, self.settings.length_exponent, self.tokens.eos_id)

    def log_probabilities(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns the task's log-probabilities of the next token, [rows, V]."""
        return self.task.log_probabilities(outputs[0])


Form: TypeAlias = TranslationForm | ContinuationForm
"""Makes inputs of the model from sources, and the search of a group from the targets of its first call.

``group`` sources are decoded together, each in ``width`` rows at most; with ``uses_caches`` a call after the first has
the new tokens alone. Arguments of `later` are the rows' parents in the call before, and their tokens, both [rows].
"""


@dataclass
class _Round:
    """Holds the groups of this replica that are still in flight, as the next round needs them.

    Attributes:
        groups: numbers of the groups; each is one micro-batch of the plan, in this order.
    """

    groups: list[int]
    plan: StepPlan
    caches: Caches | None


class Decoder:
    """Continues token sequences; every worker calls `decode` at the same time.

    Args:
        stop_requested: returns True if this worker was asked to stop.
    """

    def __init__(
        self, pipeline: WorkerPipeline, form: Form, stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        self._pipeline, self._world, self._form = pipeline, pipeline.world, form
        self._stop_requested = stop_requested
        rows = pipeline.M, form.group * form.width
        self._round = PlanMessage(pipeline.world, pipeline.shape, pipeline.M, {"parents": rows, "tokens": rows})

    def decode(self, sources: Sources, beam: int = 1) -> list[Hypothesis]:
        """Generates the tokens that follow each source.

        Args:
            sources: the same on the first worker of each replica, which reads the data, and nothing elsewhere.
            beam: rows of each source, at most the form's width.

        Returns:
            What was found for each of `sources`; nothing on workers that gave none.

        Raises:
            StopRequested: a worker was asked to stop.
        """
        batches = self._batches(sources)
        found: dict[int, Hypothesis] = {}
        replicas, replica = self._world.replicas, self._world.replica
        for turn in count():
            share = batches[turn * replicas : (turn + 1) * replicas]  # one batch a replica
            own = share[replica] if replica < len(share) else []
            made = self._run([[sources[i] for i in group] for group in own], beam)
            if made is None:
                break
            for number, groups in enumerate(share):
                for place, group in enumerate(groups):
                    found |= {i: made[number, place, row] for row, i in enumerate(group)}
        return [found[i] for i in range(len(sources))]

    def _batches(self, sources: Sources) -> list[list[list[int]]]:
        """Returns batches of M groups of source indices; the sources of a group have similar lengths."""
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        size, M = self._form.group, self._pipeline.M
        groups = [order[first : first + size] for first in range(0, len(order), size)]
        return [groups[first : first + M] for first in range(0, len(groups), M)]

    # -- one batch ---------------------------------------------------------------------------------------------

    def _run(self, groups: Sequence[Sources], beam: int) -> dict[tuple[int, int, int], Hypothesis] | None:
        """Decodes one batch of groups on each replica.

        Args:
            groups: this replica's, on its first worker; empty elsewhere.
            beam: rows of each source.

        Returns:
            On every worker the hypotheses of all replicas, by the numbers of replica, group and source in the group;
            None when no replica had any group.
        """
        going = self._first_round(groups)
        if going is None:
            return None
        searches: dict[int, BeamSearch | Sampling] = {}  # by group, on the worker of the last cell
        while going is not None:
            if going.groups:
                search = self._search(going.groups, searches, beam)
                self._pipeline.run_forward(going.plan, search, going.caches)
            self._round.run_unless_stopped(self._stop_requested)
            going = self._next_round(going)
        own = [
            [self._world.replica, group, source, hypothesis.tokens, hypothesis.log_probability, hypothesis.cut]
            for group, search in searches.items()
            for source, hypothesis in enumerate(search.best())
        ]
        everyone = [each for found in self._world.all_gather(own) for each in found]
        return {(replica, group, source): Hypothesis(*found) for replica, group, source, *found in everyone}

    def _first_round(self, groups: Sequence[Sources]) -> _Round | None:
        """Returns the round of the groups' first calls, described to all workers; None if no replica has a group."""
        micro_batches = [self._form.first(group) for group in groups] if self._world.reads_data else None
        if micro_batches is not None:
            self._round.write_plan(micro_batches, [1.0] * len(micro_batches))
        self._round.run_unless_stopped(self._stop_requested)
        plan = self._round.read_plan("generate")
        if plan.total_micro_batches == 0:
            return None
        caches: Caches | None = {} if self._form.uses_caches else None
        return _Round(list(range(len(plan.signatures))), replace(plan, micro_batches=micro_batches), caches)

    def _search(
        self, groups: Sequence[int], searches: dict[int, BeamSearch | Sampling], beam: int
    ) -> Callable[[int, Tensors, Tensors], None]:
        """Returns a function that advances the search of a micro-batch's group by one token.

        The function takes what the last cell gives (`Sink`) and writes the rows that go on into the round's message.

        Args:
            groups: number of each micro-batch's group.
            searches: searches by group; a missing one is begun.
            beam: rows of each source.
        """
        parents, tokens = self._round.mine("parents"), self._round.mine("tokens")

        def advance(micro_batch: int, outputs: Tensors, targets: Tensors) -> None:
            group = groups[micro_batch]
            if group not in searches:
                searches[group] = self._form.search(targets, beam)
            continuation = searches[group].advance(self._form.log_probabilities(outputs, targets))
            rows = len(continuation.parents)
            parents[group, :rows] = (continuation.parents + 1).double()  # 0: this row does not go on
            tokens[group, :rows] = continuation.tokens.double()

        return advance

    def _next_round(self, going: _Round) -> _Round | None:
        """Returns the next round, of the rows that the message says go on; None if no replica has rows left.

        Args:
            going: the round that has just run.
        """
        parents, tokens = (self._round.everyones(name).long() for name in ("parents", "tokens"))
        if not bool(parents.any()):
            return None
        replica = self._world.replica
        rows = {group: int((parents[replica, group] > 0).sum()) for group in going.groups}
        left = [(number, group) for number, group in enumerate(going.groups) if rows[group]]
        chosen = [(number, parents[replica, group, : rows[group]] - 1) for number, group in left]
        micro_batches = None
        if going.plan.micro_batches is not None:
            next_tokens = [tokens[replica, group, : rows[group]] for _, group in left]
            micro_batches = [
                self._form.later(going.plan.micro_batches[number], parents_of, of_group)
                for (number, parents_of), of_group in zip(chosen, next_tokens, strict=True)
            ]
        caches = going.caches
        signatures = tuple(("generate on", rows[group]) for _, group in left)
        return _Round(
            groups=[group for _, group in left],
            plan=replace(going.plan, signatures=signatures, micro_batches=micro_batches),
            caches=None if caches is None else reorder_caches(caches, chosen, self._world.device),
        )


def reorder_caches(caches: Caches, chosen: Sequence[tuple[int, Tensor]], device: torch.device) -> Caches:
    """Returns the caches of the next round, whose micro-batches hold other rows in another order.

    Every tensor in a layer's cache has one entry per row in its first dimension; any other value holds for all rows
    alike and stays.

    Args:
        chosen: number in this round of each micro-batch of the next round, and which of its rows go on, [rows].
    """
    reordered: Caches = {}
    for number, (before, rows) in enumerate(chosen):
        are_first, there = torch.equal(rows, torch.arange(len(rows))), rows.to(device)
        for cell in {cell for cell, _ in caches}:
            layers = reordered[cell, number] = caches[cell, before]
            for cache in layers:
                for name, value in cache.items():
                    if isinstance(value, Tensor) and not (are_first and len(value) == len(rows)):
                        cache[name] = value.index_select(0, there)
    return reordered
