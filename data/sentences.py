"""Translates without a corpus: keeps a run's vocabularies beside its checkpoints and makes a source of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .source import Batch, Report
from .store import whole_file
from .vocabulary import BOS, EOS, PAD, Vocabulary

SOURCE, TARGET = "source.model", "target.model"
EXAMPLE = (8, 16)  # sentences and tokens of the only batch, by which the model's costs are counted


def keep_vocabularies(store: Path, folder: Path) -> None:
    """Copies a store's vocabularies; the target's is removed if both sides share one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SOURCE, TARGET):
        if (store / name).exists():
            with whole_file(folder / name) as draft:
                shutil.copyfile(store / name, draft)
        else:
            (folder / name).unlink(missing_ok=True)


def are_kept(folder: Path) -> bool:
    """Returns whether the folder holds what `SentenceSource` reads."""
    return (folder / SOURCE).is_file()


class SentenceSource:
    """Encodes and decodes sentences; its only batch is of padding, to show the shapes.

    Args:
        vocabularies: a folder made by `keep_vocabularies`.
        source_pieces, target_pieces: the most pieces that the model knows; None: not checked.

    Raises:
        ConfigurationError: a vocabulary is damaged, or has more pieces.
    """

    pad_id, bos_id, eos_id = PAD, BOS, EOS

    def __init__(self, vocabularies: str, source_pieces: int | None = None, target_pieces: int | None = None) -> None:
        source, target = Path(vocabularies) / SOURCE, Path(vocabularies) / TARGET
        self._source = Vocabulary.read(source)
        self._target = Vocabulary.read(target) if target.exists() else self._source
        for path, vocabulary, most in ((source, self._source, source_pieces), (target, self._target, target_pieces)):
            if most is not None and len(vocabulary) > most:
                file = path if path.exists() else source
                raise ConfigurationError(
                    f"{file} has {len(vocabulary):,} pieces, but the model knows {most:,}: not of this run"
                )

    def prepare(self, report: Report) -> None:
        """Does nothing: the vocabularies are ready."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the source ids of each text with the end token, as the model reads them."""
        return [[*ids, EOS] for ids in self._source.encode(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of target ids, up to the first end token."""
        return self._target.decode(ids)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields one mini-batch of padding."""
        import torch  # imported late: `are_kept` does not need it

        tokens = torch.full(EXAMPLE, PAD)
        yield Batch([((tokens, tokens), (tokens,))] * M, None)

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Yields nothing."""
        yield from ()
