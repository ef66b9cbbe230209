"""Defines beam search for one group of sentences, as pure tensor operations on given probabilities.

A hypothesis y has the score log p(y|x) / ((|y| + 5) / 5)^exponent, where |y| counts its end-of-sentence token (Lingvo's
form of Wu et al., 2016, eq. 14; the paper names no search of its own). Greedy decoding is a beam of one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DEAD = -float("inf")  # log-probability of an empty place in the beam


@dataclass(frozen=True)
class Hypothesis:
    """Describes a finished translation.

    Attributes:
        tokens: ids, without the end-of-sentence token.
        log_probability: log p(y|x), the end-of-sentence token included unless the translation was cut.
        cut: True if no hypothesis had ended at the longest length.
    """

    tokens: list[int]
    log_probability: float
    cut: bool = False


class Continuation(NamedTuple):
    """Holds, for each row of the next round, its parent (a row of this round) and its token; both [rows]."""

    parents: Tensor
    tokens: Tensor


def length_penalty(length: Tensor, exponent: float) -> Tensor:
    """Returns ((length + 5) / 5)^exponent, float64."""
    return ((length.double() + 5) / 5).pow(exponent)


class BeamSearch:
    """Searches the translations of one group; `advance` is called once for each token.

    In the first round a sentence has one row, its beginning; afterwards it has `beam` rows until it is done. It is
    done when `beam` of its hypotheses have ended, when no open one can still beat the best of these, or at its longest
    length; then the best open one counts if none has ended. A hypothesis ends when its continuation by the
    end-of-sentence token is among the best `beam` continuations. Of equal continuations the one with the lower row,
    then the lower token, comes first.

    Args:
        limits: the longest translation of each sentence, in tokens, the end-of-sentence token included; [sentences].
        beam: hypotheses kept of each sentence.
        exponent: exponent of the length penalty; at least 0, and 0 ignores the length.
        eos_id: the end-of-sentence token.
    """

    def __init__(self, limits: Tensor, beam: int, exponent: float, eos_id: int) -> None:
        count = len(limits)
        self._beam, self._exponent, self._eos = beam, exponent, eos_id
        self._limits = limits.cpu()
        self._sentences = torch.arange(count)  # indices of those not done, in the order of their rows
        self._totals = torch.zeros(count, 1)  # log-probabilities of the open hypotheses, [not done, width]
        self._history = torch.zeros(count, 1, 0, dtype=torch.int64)  # their tokens, [not done, width, round]
        self._ended = torch.zeros(count, dtype=torch.int64)  # hypotheses of each sentence that have ended
        self._best_score = torch.full((count,), DEAD, dtype=torch.float64)
        self._best: list[Hypothesis | None] = [None] * count

    def advance(self, log_probabilities: Tensor) -> Continuation:
        """Takes the log-probabilities of the next token, [rows, V]; returns the next rows, none when all are done."""
        totals, places, tokens = self._candidates(log_probabilities)
        length = self._history.shape[2] + 1
        self._end_hypotheses(totals, places, tokens, length)
        parents = self._keep_open(totals, places, tokens)
        going_on = ~self._done(length)
        for place in (~going_on).nonzero().flatten().tolist():
            self._take_best_open(place)
        self._sentences, self._totals = self._sentences[going_on], self._totals[going_on]
        self._history = self._history[going_on]
        return Continuation(parents[going_on].flatten(), self._history[:, :, -1].flatten())

    def best(self) -> list[Hypothesis]:
        """Returns the translation of each sentence, once all are done."""
        return [hypothesis for hypothesis in self._best if hypothesis is not None]  # none is None then

    def _candidates(self, log_probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the best 2·beam continuations of each sentence, best first, each tensor [not done, 2·beam].

        At most `beam` of them end the sentence, one for each place, so at least `beam` do not. There are fewer if the
        vocabulary is small.

        Returns:
            (log-probabilities of the whole hypotheses, their places in the beam, next tokens).
        """
        count, width = self._totals.shape
        vocabulary = log_probabilities.shape[-1]
        known = self._totals.to(log_probabilities.device, torch.float32)
        continued = (known[:, :, None] + log_probabilities.float().view(count, width, vocabulary)).flatten(1)
        totals, order = _first_of_equals(continued, min(2 * self._beam, continued.shape[1]))
        order = order.cpu()
        return totals.cpu(), order // vocabulary, order % vocabulary

    def _end_hypotheses(self, totals: Tensor, places: Tensor, tokens: Tensor, length: int) -> None:
        """Ends hypotheses whose end of sentence is among the best `beam` continuations; keeps each sentence's best.

        Args:
            totals, places, tokens: the best continuations, as `_candidates` returns them.
            length: tokens of a hypothesis that ends now, with its end token.
        """
        first = slice(0, self._beam)
        ends = (tokens[:, first] == self._eos) & (totals[:, first] > DEAD)
        self._ended[self._sentences] += ends.sum(1)
        scores = totals[:, first].double() / length_penalty(torch.tensor(length), self._exponent)
        scores = torch.where(ends, scores, DEAD)
        which = scores.argmax(1)  # of equal ones the first
        values = scores.gather(1, which[:, None])[:, 0]
        for place in (values > self._best_score[self._sentences]).nonzero().flatten().tolist():
            sentence, column = int(self._sentences[place]), int(which[place])
            tokens_before = self._history[place, places[place, column]].tolist()
            self._best_score[sentence] = values[place]
            self._best[sentence] = Hypothesis(tokens_before, float(totals[place, column]))

    def _keep_open(self, totals: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        """Keeps the first `beam` continuations that do not end; returns their parents, [not done, beam]."""
        width = self._totals.shape[1]
        is_open = (tokens != self._eos) & (totals > DEAD)
        chosen = torch.sort(is_open.int(), dim=1, descending=True, stable=True).indices[:, : self._beam]
        places = places.gather(1, chosen)
        self._totals = torch.where(is_open, totals, DEAD).gather(1, chosen)
        earlier = self._history.gather(1, places[:, :, None].expand(-1, -1, self._history.shape[2]))
        self._history = torch.cat((earlier, tokens.gather(1, chosen)[:, :, None]), dim=2)
        return torch.arange(len(places))[:, None] * width + places

    def _done(self, length: int) -> Tensor:
        """Returns True for each sentence that is done now, [not done before]."""
        limits, best = self._limits[self._sentences], self._best_score[self._sentences]
        # A longer hypothesis is never more probable, and the penalty is largest at the longest length.
        reachable = self._totals.amax(1).double() / length_penalty(limits, self._exponent)
        return (self._ended[self._sentences] >= self._beam) | (best >= reachable) | (length >= limits)

    def _take_best_open(self, place: int) -> None:
        """Gives a finished sentence without an ended hypothesis its best open one."""
        sentence = int(self._sentences[place])
        if self._best[sentence] is None:
            first = int(self._totals[place].argmax())
            total = float(self._totals[place, first])
            tokens = self._history[place, first].tolist() if total > DEAD else []
            self._best[sentence] = Hypothesis(tokens, total, cut=True)


def _first_of_equals(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the largest ``count`` values of each row and their columns, largest first.

    Of equal values the first columns are taken, in their order. `topk` alone promises neither.
    """
    reach = min(count + 1, values.shape[1])
    found, order = values.topk(reach, dim=1)
    if reach > count and bool((tied := found[:, count - 1] == found[:, count]).any()):
        found, order = found.clone(), order.clone()
        found[tied], order[tied] = (
            sorted_[:, :reach] for sorted_ in values[tied].sort(dim=1, descending=True, stable=True)
        )
    found, order = found[:, :count], order[:, :count]
    by_place = order.sort(dim=1).indices
    found, order = found.gather(1, by_place), order.gather(1, by_place)
    by_value = found.sort(dim=1, descending=True, stable=True).indices
    return found.gather(1, by_value), order.gather(1, by_value)
