"""Reads and writes text without a corpus: keeps a run's vocabularies beside its checkpoints, makes a source of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..micro_batch import MicroBatch
from .cache import whole_file
from .source import Batch, Source
from .tokenizer import TokenizerFile
from .vocabulary import BOS, EOS, PAD, Vocabulary

SOURCE, TARGET, TOKENIZER = "source.model", "target.model", "tokenizer.json"
EXAMPLE = (8, 16)  # sentences and tokens of the only batch, by which the model's costs are counted


def keep_vocabularies(store: Path, folder: Path) -> None:
    """Copies a store's vocabularies; those that it does not have are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SOURCE, TARGET, TOKENIZER):
        if (store / name).exists():
            with whole_file(folder / name) as draft:
                shutil.copyfile(store / name, draft)
        else:
            (folder / name).unlink(missing_ok=True)


def vocabulary_file(folder: Path) -> Path:
    """Returns the file in a folder that says what a text's ids mean."""
    return folder / (TOKENIZER if (folder / TOKENIZER).exists() else SOURCE)


def read_vocabulary(path: Path, end_token: str | None = None) -> Vocabulary | TokenizerFile:
    """Returns the vocabulary of a file: a tokenizer.json, or a .model that a run has kept.

    Args:
        end_token: see `TokenizerFile`.

    Raises:
        ConfigurationError: it is neither, or damaged.
    """
    if path.suffix == ".model" and path.is_file():
        return Vocabulary(path.read_bytes(), path)
    return TokenizerFile(path, end_token)


def read_both(folder: Path) -> tuple[Vocabulary, Vocabulary]:
    """Returns the vocabularies of sources and of targets in a folder; one object if they share one."""
    source, target = (folder / name for name in (SOURCE, TARGET))
    of_source = Vocabulary(source.read_bytes(), source)
    return of_source, Vocabulary(target.read_bytes(), target) if target.exists() else of_source


class _VocabulariesOnly(Source):
    """Encodes and decodes text; yields one mini-batch, which shows the shapes: there is no corpus."""

    _source: Vocabulary | TokenizerFile
    _target: Vocabulary | TokenizerFile
    _example: MicroBatch

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields the one mini-batch."""
        yield Batch([self._example] * M, None)

    def evaluation(self, M: int) -> Iterator[Batch]:
        """Yields nothing."""
        yield from ()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the source ids of each text."""
        return self._source.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of target ids, up to the first end token."""
        return self._target.decode(ids)


class SentenceSource(_VocabulariesOnly):
    """Encodes and decodes sentences; its only batch is of padding.

    Args:
        vocabularies: a folder made by `keep_vocabularies`.

    Raises:
        ConfigurationError: a vocabulary is damaged.
    """

    pad_id, bos_id, eos_id = PAD, BOS, EOS

    def __init__(self, vocabularies: str) -> None:
        import torch  # imported late: `vocabulary_file` does not need it

        self._source, self._target = read_both(Path(vocabularies))
        tokens = torch.full(EXAMPLE, PAD)
        self._example = (tokens, tokens), (tokens,)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the source ids of each text with the end token, as the model reads them."""
        return [[*ids, EOS] for ids in super().encode(texts)]


class PromptSource(_VocabulariesOnly):
    """Encodes and decodes the text of a language model; its only batch is of end tokens.

    Args:
        vocabularies: a folder made by `keep_vocabularies`.
        sequence_length: tokens of an example in training.
        end_token: see `TokenizerFile`.

    Raises:
        ConfigurationError: the vocabulary is damaged.
    """

    def __init__(self, vocabularies: str, sequence_length: int, end_token: str | None = None) -> None:
        import torch

        self._source = self._target = read_vocabulary(vocabulary_file(Path(vocabularies)), end_token)
        self.eos_id = self._source.eos_id
        tokens = torch.full((1, sequence_length), self.eos_id)
        self._example = (tokens,), (tokens,)
