"""Vocabularies alone, as a run keeps them beside its checkpoints: enough to translate, with no corpus at hand."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .source import Batch, Report
from .vocabulary import BOS, EOS, PAD, Vocabulary

SOURCE, TARGET = "source.model", "target.model"
EXAMPLE = (8, 16)  # sentences and tokens of the one batch, by which the model's costs are counted


def keep_vocabularies(store: Path, folder: Path) -> None:
    """Copies a store's vocabularies, each whole or not at all; none for the target where both sides share one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SOURCE, TARGET):
        if (store / name).exists():
            draft = folder / f".{name}"
            shutil.copyfile(store / name, draft)
            draft.replace(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def are_kept(folder: Path) -> bool:
    """Whether the folder holds what `SentenceSource` reads."""
    return (folder / SOURCE).is_file()


class SentenceSource:
    """Encodes and decodes sentences; of batches it has one, of padding, to show their form.

    Args:
        vocabularies: a folder made by `keep_vocabularies`.
    """

    pad_id, bos_id, eos_id = PAD, BOS, EOS

    def __init__(self, vocabularies: str) -> None:
        folder = Path(vocabularies)
        self._source = Vocabulary((folder / SOURCE).read_bytes())
        own = folder / TARGET
        self._target = Vocabulary(own.read_bytes()) if own.exists() else self._source

    def prepare(self, report: Report) -> None:
        """Nothing is to be prepared."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each source text, with the end mark, as the model reads it."""
        return [[*ids, EOS] for ids in self._source.encode(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of target ids, up to the first end mark."""
        return self._target.decode(ids)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """One mini-batch of padding."""
        import torch  # here, because the command that looks for kept vocabularies has no use for it

        tokens = torch.full(EXAMPLE, PAD)
        yield Batch([((tokens, tokens), (tokens,))] * M, None)

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Nothing."""
        yield from ()
