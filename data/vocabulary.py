"""Subword pieces shared by all languages: a SentencePiece unigram model (Kudo & Richardson, 2018)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence

import sentencepiece

from ..errors import ConfigurationError

PAD, UNKNOWN, BOS, EOS = 0, 1, 2, 3


def train_vocabulary(
    sentences: Iterable[str], size: int, character_coverage: float = 1.0, key: str = "vocabulary"
) -> bytes:
    """Train exactly `size` pieces; the same sentences in the same order give the same bytes.

    Digits stand alone, since languages group them differently: 6.629.945 is 6,629,945.

    Args:
        character_coverage: share of the text's characters that get pieces; the rest, the rarest, read as unknown.
        key: under `data`, which says the size; for messages.

    Raises:
        ConfigurationError: the sentences support fewer pieces than `size`, or need more for their characters alone.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            character_coverage=character_coverage,
            split_digits=True,
            normalization_rule_name="nmt_nfkc",
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=BOS,
            eos_id=EOS,
            num_threads=2,  # fixed: sums of floats depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigurationError(_limit(size, str(error), key)) from error
    return model.getvalue()


def _limit(size: int, message: str, key: str) -> str:
    if largest := re.search(r"set it to a value <= (\d+)", message):
        return f"data.{key}={size}, but this corpus supports {largest[1]} pieces: use data.{key}={largest[1]}"
    if smallest := re.search(r"\d+ vs (\d+)", message):
        return (
            f"data.{key}={size}, but the corpus has {smallest[1]} pieces to hold for its characters alone: "
            f"use data.{key}={int(smallest[1]) * 2} or fewer data.languages"
        )
    return f"data.{key}={size}: SentencePiece could not train: {message}"


class Vocabulary:
    """A trained model: texts to ids and back."""

    def __init__(self, model: bytes) -> None:
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)

    def __len__(self) -> int:
        return int(self._pieces.get_piece_size())

    def encode(self, texts: Sequence[str], threads: int = 2) -> list[list[int]]:
        """The ids of each text, with no beginning or end mark."""
        ids: list[list[int]] = self._pieces.encode(list(texts), out_type=int, num_threads=threads)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text up to the first end mark; padding and marks leave no trace."""
        kept = list(ids)[: list(ids).index(EOS)] if EOS in ids else list(ids)
        text: str = self._pieces.decode([int(piece) for piece in kept if piece not in (PAD, BOS)])
        return text
