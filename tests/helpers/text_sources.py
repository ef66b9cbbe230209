"""Opens sources of a user's own text as tests need them: prepared, with a cache beside the text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import sentencepiece

from gpipe_cli.data.parallel.source import ParallelTextSource
from gpipe_cli.data.source import Report, no_report
from gpipe_cli.data.store import Store

Kind = TypeVar("Kind")


def prepared(kind: Callable[..., Kind], root: Path, settings: Mapping[str, Any]) -> Kind:
    """Returns a prepared source of the text under ``root``."""
    made: Any = kind(str(root), **{"cache_dir": str(root.parent / "cache"), **settings})
    made.prepare(no_report)
    return made  # type: ignore[no-any-return]  # sources have no common base class


def places(made: Any) -> list[tuple[str, str, int]]:
    """Returns kind, file and line of the first defect of each kind."""
    found = []
    for kind, text in made._store.defects.first.items():
        file, _, line = text.partition(": ")[0].partition(", line ")
        found.append((kind, Path(file).name, int(line or 0)))
    return found


def sentences(store: Store, code: str, side: int) -> list[str]:
    """Returns the training sentences of a language on one side of a store, decoded, in the order of the disk."""
    count, number = store.sizes[code], [*store.languages].index(code)
    texts = store.gather(store.locate(np.full(count, number), np.arange(count)))[side]
    vocabulary = (store.source_vocabulary, store.target_vocabulary)[side]
    return [vocabulary.decode(ids.tolist()) for ids in texts]


def in_small_pieces(root: Path, cache: Path, workers: int = 1, report: Report = no_report) -> Store:
    """Prepares parallel text with pieces, blocks and shards so small that there are many."""
    keys = {"source_vocabulary": 300, "target_vocabulary": 300, "preparation_workers": workers}
    source = ParallelTextSource(str(root), cache_dir=str(cache), **keys)
    source.text = replace(source.text, piece=20, block=16, shard=64)
    source.prepare(report)
    return source._store


def own_tokenizer(folder: Path, texts: Iterable[str], special: Sequence[str] = ()) -> Path:
    """Writes a tokenizer.json of bytes, with special tokens from id 0 on, and returns its path."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.ByteLevel(False), tokenizers.decoders.ByteLevel()
    how = {"special_tokens": [*special], "initial_alphabet": tokenizers.pre_tokenizers.ByteLevel.alphabet()}
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=290, **how))
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def own_sentencepiece(folder: Path, texts: Iterable[str], **ids: int) -> Path:
    """Returns a model as SentencePiece makes it by default: <unk>, <s> and </s> are 0 to 2, without padding."""
    prefix = folder / "own"
    sizes: dict[str, Any] = {"vocab_size": 200, "hard_vocab_limit": False, "character_coverage": 1.0}
    how = {"model_prefix": str(prefix), "normalization_rule_name": "identity", "minloglevel": 2, **sizes, **ids}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), **how)
    return prefix.with_suffix(".model")
