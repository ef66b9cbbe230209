"""Defines how a language model continues prompts: by the most probable token, or by one drawn at random.

A draw is a function of the seed, the prompt's and the sample's number and the place of the token alone, so that it
depends neither on the cut nor on what else is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import SamplingSettings
from ..errors import ConfigurationError
from ..micro_batch import MicroBatch, Tensors
from ..pipeline.randomness import derive_seed
from .beam import Continuation, Hypothesis

DRAW = 4  # the purpose of these seeds, beside those in pipeline/randomness.py
PROMPT, SAMPLE, LAST = range(3)  # columns of the targets; LAST: the place whose output predicts the next token


@dataclass(frozen=True)
class Prompt:
    """Holds a sequence to continue.

    Attributes:
        number: number of the prompt among all of the command.
        sample: number of the text among those drawn for the prompt.
    """

    ids: Sequence[int]
    number: int
    sample: int

    def __len__(self) -> int:
        return len(self.ids)


class ContinuationForm:
    """Decodes prompts; a `Form`. A group holds the samples of one prompt.

    The targets of a row, int64 [3], are the numbers of its prompt and sample, and `LAST`.

    Args:
        eos_id: id of the token that ends a document.
        window: tokens of every input where the layers keep no caches; the last ones count. None: caches are used.
    """

    width = 1

    def __init__(self, settings: SamplingSettings, eos_id: int, window: int | None) -> None:
        self.settings, self.eos_id, self.window = settings, eos_id, window
        self.group, self.uses_caches = settings.samples, window is None

    def first(self, sources: Sequence[Prompt]) -> MicroBatch:
        """Returns a group's first micro-batch.

        Args:
            sources: the same prompt for each sample, so all have one length.
        """
        ids = torch.tensor([list(source.ids) for source in sources])
        of_row = torch.tensor([[source.number, source.sample, 0] for source in sources])
        return self._inputs(ids, of_row)

    def later(self, before: MicroBatch, parents: Tensor, tokens: Tensor) -> MicroBatch:
        """Returns a group's next micro-batch: the new tokens, behind all earlier ones if there are no caches.

        Args:
            before: the group's micro-batch of the round before.
            parents: rows of ``before`` that go on, [rows].
            tokens: the next token of each, [rows].
        """
        (ids,), (of_row,) = before
        of_row, ids = of_row[parents], ids[parents]
        if self.window is None:
            return self._inputs(tokens[:, None], of_row)
        return self._inputs(torch.cat((ids[:, : int(of_row[0, LAST]) + 1], tokens[:, None]), 1), of_row)

    def _inputs(self, ids: Tensor, of_row: Tensor) -> MicroBatch:
        """Returns a micro-batch of ``ids`` [rows, tokens], padded to the window, with targets ``of_row`` [rows, 3]."""
        ids, of_row = ids[:, -self.window :] if self.window else ids, of_row.clone()
        of_row[:, LAST] = ids.shape[1] - 1
        if self.window is not None:  # padding on the right: a causal model does not see it
            ids = torch.nn.functional.pad(ids, (0, self.window - ids.shape[1]), value=self.eos_id)
        return (ids,), (of_row,)

    def search(self, targets: Tensors, beam: int) -> Sampling:
        """Returns the choice of tokens for a group."""
        return Sampling(targets[0], self.settings, self.eos_id)

    def log_probabilities(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns float64 [rows, V] of the next tokens, on the CPU.

        Raises:
            ConfigurationError: the model's outputs are no logits of tokens.
        """
        logits = outputs[0]
        if logits.dim() != 3:
            raise ConfigurationError(
                f"the model's outputs are of shape {list(logits.shape)}, not logits [rows, tokens, vocabulary]: it is "
                "no language model that continues a text"
            )
        return logits[:, int(targets[0][0, LAST])].cpu().double().log_softmax(-1)


class Sampling:
    """Chooses the tokens of one group of rows.

    Args:
        targets: the targets of the group's first call, [rows, 3].
        eos_id: id of the token that ends a row.
    """

    def __init__(self, targets: Tensor, settings: SamplingSettings, eos_id: int) -> None:
        self._settings, self._eos = settings, eos_id
        self._keys = targets[:, [PROMPT, SAMPLE]].tolist()
        self._open = list(range(len(self._keys)))  # rows that go on
        self._tokens: list[list[int]] = [[] for _ in self._keys]
        self._totals = [0.0] * len(self._keys)

    def advance(self, log_probabilities: Tensor) -> Continuation:
        """Takes the log-probabilities of the next token, [rows, V]; returns the next rows, none when all are done."""
        left: list[int] = []
        for place, row in enumerate(self._open):
            token = self._choose(log_probabilities[place], row)
            self._totals[row] += float(log_probabilities[place, token])
            if token != self._eos:
                self._tokens[row].append(token)
                if len(self._tokens[row]) < self._settings.length:
                    left.append(place)
        self._open = [self._open[place] for place in left]
        last = torch.tensor([self._tokens[row][-1] for row in self._open], dtype=torch.int64)
        return Continuation(torch.tensor(left, dtype=torch.int64), last)

    def best(self) -> list[Hypothesis]:
        """Returns each row's tokens and their log-probability."""
        return [Hypothesis(tokens, total) for tokens, total in zip(self._tokens, self._totals, strict=True)]

    def _choose(self, log_probabilities: Tensor, row: int) -> int:
        """Returns the next token of a row: the most probable at temperature 0, else one drawn by its probability.

        Args:
            log_probabilities: log-probabilities of all tokens, [V].
        """
        settings = self._settings
        if settings.temperature == 0:
            return int(log_probabilities.argmax())
        order = torch.sort(log_probabilities, descending=True, stable=True).indices[: settings.top_k]
        shares = (log_probabilities[order] / settings.temperature).softmax(0)
        if settings.top_p < 1:
            shares = shares[: 1 + int((shares.cumsum(0) < settings.top_p).sum())]
        bounds = shares.cumsum(0)
        drawn = derive_seed(DRAW, settings.seed, *self._keys[row], len(self._tokens[row])) / 2**63
        place = int(torch.searchsorted(bounds, drawn * float(bounds[-1]), right=True))
        return int(order[min(place, len(shares) - 1)])
