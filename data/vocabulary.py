"""Subword pieces shared by all languages: a SentencePiece unigram model (Kudo & Richardson, 2018)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence

import sentencepiece

PAD, UNKNOWN, BOS, EOS = 0, 1, 2, 3


def train_vocabulary(sentences: Iterable[str], size: int) -> bytes:
    """Train exactly `size` pieces; the same sentences in the same order give the same bytes.

    Every character is covered (27 scripts share the vocabulary), and digits stand alone, since languages group
    them differently: 6.629.945 is 6,629,945.

    Raises:
        ValueError: the sentences support fewer pieces than `size`, or need more for their characters alone.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            character_coverage=1.0,
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
        raise ValueError(_limit(size, str(error))) from error
    return model.getvalue()


def _limit(size: int, message: str) -> str:
    if largest := re.search(r"set it to a value <= (\d+)", message):
        return f"data.vocabulary={size}, but this corpus supports {largest[1]} pieces: use data.vocabulary={largest[1]}"
    if smallest := re.search(r"\d+ vs (\d+)", message):
        return (
            f"data.vocabulary={size}, but the corpus has {smallest[1]} pieces to hold for its characters alone: "
            f"use data.vocabulary={int(smallest[1]) * 2} or fewer data.languages"
        )
    return f"data.vocabulary={size}: SentencePiece could not train: {message}"


class Vocabulary:
    """A trained model: texts to ids and back."""

    def __init__(self, model: bytes) -> None:
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)

    def __len__(self) -> int:
        return int(self._pieces.get_piece_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, with no beginning or end mark."""
        ids: list[list[int]] = self._pieces.encode(list(texts), out_type=int, num_threads=2)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text up to the first end mark; padding and marks leave no trace."""
        kept = list(ids)[: list(ids).index(EOS)] if EOS in ids else list(ids)
        text: str = self._pieces.decode([int(piece) for piece in kept if piece not in (PAD, BOS)])
        return text
