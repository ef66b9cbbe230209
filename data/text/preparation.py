"""Makes the store of a text, with several processes.

A vocabulary is trained on a sample, or copied; pieces of the files become ids. All of this happens in a folder of the
cache that becomes the store at the end:

store.json              documents, a digest of each piece that is trained on, defects of the text
source.model, or tokenizer.json and tokenizer_config.json, which names its end token
train, dev              uint16 or uint32: the ids of each document and an end token
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import TypedDict

from ...disk import write_whole
from ...errors import ConfigurationError
from ..cache import append
from ..defects import Defects
from ..prepared import RunAll, in_processes
from ..sampling import EvenSample
from ..source import Report
from ..store import Tokens, token_kind
from ..vocabulary import (
    CONFIG,
    SOURCE,
    TOKENIZER,
    AnyVocabulary,
    Normalization,
    read_vocabulary,
    train_vocabulary,
    vocabulary_file,
)
from .files import SEPARATORS, TextPiece, documents, read_text

FORMAT = 4  # raised when the same parameters would give other bytes
SPLITS = ("train", "dev")

AT_ONCE = 256  # documents that are encoded at once
SAMPLES = 20_000  # texts of at most `LONGEST_SAMPLE` characters given to SentencePiece
LONGEST_SAMPLE = 1_000  # characters; SentencePiece leaves out texts of more than 4,192 bytes


@dataclass(frozen=True)
class TextForm:
    """Holds all that decides the bytes of a store, besides the text.

    Attributes:
        document, json_key: see `documents`.
        held_out: share of the documents that are held out; 0: none.
        seed: decides their draw.
        tokenizer: path of a tokenizer.json or SentencePiece .model; None: SentencePiece is trained.
        end_token: text of the token that ends a document, see `TokenizerFile`.
        vocabulary: pieces of the SentencePiece model.
        character_coverage, smaller, normalization: see `train_vocabulary`.
        piece: bytes of text that one process takes at a time.
    """

    document: str
    json_key: str
    held_out: float
    seed: int
    tokenizer: str | None
    end_token: str | None
    vocabulary: int
    character_coverage: float
    smaller: bool
    normalization: Normalization
    piece: int

    def holds_out(self, text: str) -> bool:
        """Returns whether a document is held out: a function of its text and the seed."""
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self.seed.to_bytes(8, "little")).digest()
        return int.from_bytes(digest, "little") < self.held_out * 2**64

    def pieces(self, file: Path) -> Iterator[TextPiece]:
        return read_text(file, self.piece, SEPARATORS[self.document])


class TextDescription(TypedDict):
    """Describes store.json: the end token, the number of documents, and digests of the pieces that are trained on."""

    end_token: str | None
    documents: int
    digests: list[str]
    defects: Defects


class EncodedText(NamedTuple):
    """Holds a piece of text as ids.

    Attributes:
        documents: number of documents.
        ids: those that are trained on, and those that are held out.
        digest: digest of the ids that are trained on; None without any.
    """

    documents: int
    ids: Sequence[Tokens]
    digest: str | None
    defects: Defects


def prepare_text(
    form: TextForm, files: Sequence[Path], held_out: Sequence[Path], folder: Path, workers: int, report: Report
) -> None:
    """Makes a store in a folder, with so many processes.

    Args:
        files: files to train on; a share of their documents is held out.
        held_out: files that are held out as a whole.

    Raises:
        ConfigurationError: a file is refused, or no vocabulary of this size can be trained.
    """
    defects, count, digests, tokens = Defects(), 0, list[str](), 0
    jobs = (
        (piece, of_file, folder)
        for of_file, group in ((form, files), (replace(form, held_out=1.0), held_out))
        for file in group
        for piece in of_file.pieces(file)
    )
    with in_processes(workers) as run_all:
        if form.tokenizer is None:
            (folder / SOURCE).write_bytes(_trained(form, files, run_all, report))
        else:
            shutil.copyfile(form.tokenizer, folder / (SOURCE if form.tokenizer.endswith(".model") else TOKENIZER))
            if form.end_token is not None:
                write_whole(folder / CONFIG, json.dumps({"eos_token": form.end_token}))
        report("text: tokens", 0, 0)
        for split in SPLITS:
            (folder / split).touch()
        for piece in run_all(encode_piece, jobs):
            defects.update(piece.defects)
            count += piece.documents
            digests += filter(None, [piece.digest])
            for split, ids in zip(SPLITS, piece.ids, strict=True):
                append(folder / split, ids)
                tokens += len(ids)
            report("text: tokens", tokens, 0)
    report("text: tokens", tokens, tokens)
    made = {"end_token": form.end_token, "documents": count, "digests": digests, "defects": vars(defects)}
    write_whole(folder / "store.json", json.dumps({"format": FORMAT, **made}, indent=1, ensure_ascii=False))


def _trained(form: TextForm, files: Sequence[Path], run_all: RunAll, report: Report) -> bytes:
    """Trains a vocabulary on an even sample of the text; returns the model's bytes."""
    texts, unusable = list[str](), Defects()
    sizes = [file.stat().st_size for file in files]
    samples = (min(int(2 * size / max(1, sum(sizes)) * SAMPLES) + 1, SAMPLES) for size in sizes)  # twice its share
    for done, (sample, defects) in enumerate(run_all(sample_texts, zip(files, samples, repeat(form)))):
        report("text: reading it for the vocabulary", done, len(files))
        texts += sample
        unusable.update(defects)
    report("text: vocabulary", 0, 0)
    count = min(len(texts), SAMPLES)
    if not count:
        none = f"{files[0]} and the others have no document that is not held out"
        why = next(iter(unusable.first.values()), none)
        raise ConfigurationError(f"no line of the text can be used for training. {why}")
    texts = [texts[i * len(texts) // count] for i in range(count)]
    how = (form.character_coverage, "vocabulary", form.smaller, form.normalization)
    return train_vocabulary(texts, form.vocabulary, *how)


# -- in the processes --------------------------------------------------------------------------------------------------


def sample_texts(file: Path, wanted: int, form: TextForm) -> tuple[list[str], Defects]:
    """Returns an even sample of the texts that are trained on, in slices of at most `LONGEST_SAMPLE` characters.

    Returns:
        The sample; the defects of the file.
    """
    sample, defects = EvenSample[str](wanted), Defects()
    for piece in form.pieces(file):
        for text in documents(piece, form.document, form.json_key, defects):
            used = "" if form.holds_out(text) else text
            starts = range(0, len(text), LONGEST_SAMPLE)
            sample.extend([used[start : start + LONGEST_SAMPLE] for start in starts])
    return list(filter(None, sample.kept)), defects


def encode_piece(piece: TextPiece, form: TextForm, folder: Path) -> EncodedText:
    """Encodes a piece's documents by the vocabulary in a store's folder."""
    defects, texts = Defects(), dict[bool, list[str]]({False: [], True: []})
    for text in documents(piece, form.document, form.json_key, defects):
        texts[form.holds_out(text)].append(text)
    trained, dev = (_tokens(texts[held_out], form, folder) for held_out in (False, True))
    digest = hashlib.blake2b(trained.tobytes(), digest_size=16).hexdigest() if len(trained) else None
    return EncodedText(sum(map(len, texts.values())), (trained, dev), digest, defects)


def _tokens(texts: Sequence[str], form: TextForm, folder: Path) -> Tokens:
    """Returns the ids of all documents in one array, with an end token after each."""
    vocabulary = _opened(folder, form.end_token)
    kind = token_kind(vocabulary)
    parts = [np.empty(0, kind)]
    for first in range(0, len(texts), AT_ONCE):  # Python's lists of numbers take twenty times the memory
        ids = vocabulary.encode(texts[first : first + AT_ONCE], threads=1)
        count = sum(map(len, ids)) + len(ids)
        parts.append(np.fromiter(chain.from_iterable((*text, vocabulary.eos_id) for text in ids), kind, count))
    return np.concatenate(parts)


@lru_cache(maxsize=2)
def _opened(folder: Path, end_token: str | None) -> AnyVocabulary:
    return read_vocabulary(vocabulary_file(folder), end_token)
