"""Trains and reads vocabularies of subword pieces: a SentencePiece unigram model (Kudo & Richardson, 2018)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import sentencepiece

from ..errors import ConfigurationError

PAD, UNKNOWN, BOS, EOS = 0, 1, 2, 3
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def train_vocabulary(
    sentences: Iterable[str],
    size: int,
    character_coverage: float = 1.0,
    key: str = "vocabulary",
    smaller: bool = False,
) -> bytes:
    """Trains `size` pieces and returns the model; equal sentences in equal order give equal bytes.

    Digits are pieces of their own, because languages group them differently: 6.629.945 is 6,629,945.

    Args:
        character_coverage: share of the text's characters that get pieces; the rest, the rarest, become unknown.
        key: the key under `data` that holds the size; for messages.
        smaller: train fewer pieces where the sentences support fewer.

    Raises:
        ConfigurationError: the sentences support fewer pieces than `size` and not `smaller`, or need more for their
            characters alone.
    """
    model = io.BytesIO()
    soft_limit: dict[str, Any] = {"hard_vocab_limit": False} if smaller else {}  # the model's bytes hold what is given
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            **soft_limit,
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
        raise ConfigurationError(_explained(size, str(error), key)) from error
    return model.getvalue()


def _explained(size: int, message: str, key: str) -> str:
    """Returns SentencePiece's message with the key and a size that works."""
    if largest := re.search(r"set it to a value <= (\d+)", message):
        return (
            f"data.{key}={size}, but this corpus supports {largest[1]} pieces: use data.{key}={largest[1]}, or "
            "data.smaller_vocabulary=true to train as many as there are"
        )
    if smallest := re.search(r"\d+ vs (\d+)", message):
        return (
            f"data.{key}={size}, but the corpus has {smallest[1]} pieces to hold for its characters alone: "
            f"use data.{key}={int(smallest[1]) * 2} or fewer data.languages"
        )
    return f"data.{key}={size}: SentencePiece could not train: {message}"


def smaller_notice(key: str, wanted: int, vocabulary: Sized) -> str | None:
    """Returns a warning if a vocabulary has fewer pieces than the key under `data` asks for."""
    if len(vocabulary) == wanted:
        return None
    return (
        f"data.{key}={wanted}, but the text supports {len(vocabulary):,} pieces only, so "
        f"{wanted - len(vocabulary):,} rows of the model's tables stay unused: use data.{key}={len(vocabulary)} "
        "for a smaller model"
    )


class Vocabulary:
    """Turns texts into ids and back with a trained model.

    Args:
        model: as `train_vocabulary` returns it.
        name: of its file, for messages.

    Raises:
        ConfigurationError: it is no such model.
    """

    eos_id = EOS

    def __init__(self, model: bytes, name: object = "the vocabulary") -> None:
        try:
            self._pieces = pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
            special: tuple[int, ...] | None = pieces.pad_id(), pieces.unk_id(), pieces.bos_id(), pieces.eos_id()
        except RuntimeError:
            special = None
        if special != (PAD, UNKNOWN, BOS, EOS):
            raise ConfigurationError(f"{name} is no vocabulary that gpipe-train has made, or a damaged one")

    def __len__(self) -> int:
        return int(self._pieces.get_piece_size())

    def encode(self, texts: Sequence[str], threads: int = 2) -> list[list[int]]:
        """Returns the ids of each text, without beginning and end tokens."""
        ids: list[list[int]] = self._pieces.encode(list(texts), out_type=int, num_threads=threads)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text up to the first end token; control characters, which a terminal would obey, as U+FFFD."""
        kept = list(ids)[: list(ids).index(EOS)] if EOS in ids else list(ids)
        # A model may know more ids than there are pieces: data.smaller_vocabulary.
        text: str = self._pieces.decode([int(piece) for piece in kept if piece not in (PAD, BOS) and piece < len(self)])
        return CONTROL.sub("\ufffd", text)
