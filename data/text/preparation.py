"""Makes the store of a text, with several processes.

A vocabulary is trained on a sample, or copied; pieces of the files become ids. All of this happens in a folder of the
cache that becomes the store at the end:

store.json              documents, and a digest of each piece that is trained on; written last
source.model or tokenizer.json
defects.json            what was found when the store was made
train.npy, dev.npy      uint16 or uint32: the ids of each document and an end token
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict

from ...disk import whole_file, write_whole
from ...errors import ConfigurationError
from ..cache import GrowingArray
from ..defects import Defect, Defects
from ..prepared import RunAll, in_processes
from ..sampling import EvenSample
from ..source import Report
from ..vocabulary import (
    SOURCE,
    TOKENIZER,
    AnyVocabulary,
    Normalization,
    read_vocabulary,
    train_vocabulary,
    vocabulary_file,
)
from .files import SEPARATORS, TextPiece, documents, read_text

FORMAT = 2  # raised when the same parameters would give other bytes
SPLITS = ("train", "dev")
Ids = npt.NDArray[np.unsignedinteger[Any]]

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
        end_token: see `TokenizerFile`.
        vocabulary: pieces of the SentencePiece model.
        character_coverage, smaller, normalization: see `train_vocabulary`.
        piece: bytes of text that one process takes at a time.
        ends: the share is the end of each piece instead, for a few long documents.
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
    ends: bool = False

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


class EncodedText(NamedTuple):
    """Holds a piece of text as ids: those that are trained on, and those that are held out.

    Attributes:
        documents: their number.
        digest: digest of the ids that are trained on; None without any.
    """

    documents: int
    ids: Sequence[Ids]
    digest: str | None
    defects: Defects


@dataclass
class TextPreparation:
    """Makes one store.

    Attributes:
        files: to train on; a share of their documents is held out.
        held_out: files that are held out as a whole.
        strict: whether defects are refused.
        draft: the folder that becomes the store.
        workers: number of processes.
    """

    form: TextForm
    files: Sequence[Path]
    held_out: Sequence[Path]
    strict: bool
    draft: Path
    workers: int
    report: Report
    _defects: Defects = field(default_factory=Defects)

    def run(self) -> None:
        """Does all steps.

        Raises:
            ConfigurationError: a file or a defect is refused, or no vocabulary of this size can be trained.
        """
        with in_processes(self.workers) as run_all:
            if self.form.tokenizer is not None:
                given = Path(self.form.tokenizer)
                with whole_file(self.draft / (SOURCE if given.suffix == ".model" else TOKENIZER)) as draft:
                    shutil.copyfile(given, draft)
            else:
                self._train_vocabulary(run_all)
            content = self._encode(run_all)
        self._defects.write(self.draft, content["documents"])
        made_of = {key: value for key, value in asdict(self.form).items() if key != "tokenizer"}
        described = {"format": FORMAT, "made_of": made_of, **content}
        write_whole(self.draft / "store.json", json.dumps(described, indent=1, ensure_ascii=False))

    def _train_vocabulary(self, run_all: RunAll) -> None:
        form, texts, unusable = self.form, list[str](), list[Defect]()
        sizes = [file.stat().st_size for file in self.files]
        samples = (min(int(2 * size / max(1, sum(sizes)) * SAMPLES) + 1, SAMPLES) for size in sizes)  # twice its share
        jobs = zip(self.files, samples, repeat(form))
        for done, (sample, first) in enumerate(run_all(sample_texts, jobs)):
            self.report("text: reading it for the vocabulary", done, len(self.files))
            texts += sample
            unusable += first
        self.report("text: vocabulary", 0, 0)
        count = min(len(texts), SAMPLES)
        if not count:
            why = unusable[0] if unusable else f"{self.files[0]} and the others have no document that is not held out"
            raise ConfigurationError(f"no line of the text can be used for training. {why}")
        texts = [texts[i * len(texts) // count] for i in range(count)]
        arguments = (form.vocabulary, form.character_coverage, "vocabulary", form.smaller, form.normalization)
        with whole_file(self.draft / SOURCE) as draft:
            draft.write_bytes(train_vocabulary(texts, *arguments))

    def _encode(self, run_all: RunAll) -> TextDescription:
        """Writes the ids of all pieces; returns what store.json says of them."""
        made = TextDescription(end_token=self.form.end_token, documents=0, digests=[])
        kind = _kind(_opened(self.draft, self.form.end_token))
        arrays = [GrowingArray(self.draft / f"{split}.npy", kind) for split in SPLITS]
        self.report("text: tokens", 0, 0)
        for piece in run_all(encode_piece, self._encode_jobs()):
            self._defects.update(piece.defects, self.strict)
            made["documents"] += piece.documents
            made["digests"] += filter(None, [piece.digest])
            for array, ids in zip(arrays, piece.ids, strict=True):
                array.append(ids)
            self.report("text: tokens", sum(array.size for array in arrays), 0)
        for array in arrays:
            array.close()
        tokens = sum(array.size for array in arrays)
        self.report("text: tokens", tokens, tokens)
        return made

    def _encode_jobs(self) -> Iterator[tuple[TextPiece, TextForm, Path]]:
        for number, file in enumerate((*self.files, *self.held_out)):
            of_file = self.form if number < len(self.files) else replace(self.form, held_out=1.0)
            for piece in of_file.pieces(file):
                yield piece, of_file, self.draft


# -- in the processes --------------------------------------------------------------------------------------------------


def sample_texts(file: Path, wanted: int, form: TextForm) -> tuple[list[str], list[Defect]]:
    """Returns an even sample of the texts that are trained on, in slices of at most `LONGEST_SAMPLE` characters.

    Returns:
        The sample; the first defect, if there is one.
    """
    sample, defects = EvenSample[str](wanted), Defects()
    for piece in form.pieces(file):
        for document in documents(piece, form.document, form.json_key, defects):
            starts = range(0, len(document.text), LONGEST_SAMPLE)
            chosen = sample.places(len(starts))
            if len(chosen) and not form.holds_out(document.text):
                for place in chosen:
                    sample.keep(place, document.text[starts[place] : starts[place] + LONGEST_SAMPLE])
            sample.go_on(len(starts))
    return sample.items, defects.examples[:1]


def encode_piece(piece: TextPiece, form: TextForm, folder: Path) -> EncodedText:
    """Returns the ids of a piece's documents, by the vocabulary of a store."""
    found = Defects()
    texts = [document.text for document in documents(piece, form.document, form.json_key, found)]
    held_out = [not form.ends and form.holds_out(text) for text in texts]
    chosen = ([text for text, is_out in zip(texts, held_out, strict=True) if is_out == wanted] for wanted in (0, 1))
    trained, dev = (_tokens(of, form, folder) for of in chosen)
    if form.ends:
        trained, dev = np.split(trained, [len(trained) - int(form.held_out * len(trained))])
    digest = hashlib.blake2b(trained.tobytes(), digest_size=16).hexdigest() if len(trained) else None
    return EncodedText(len(texts), (trained, dev), digest, found)


def _tokens(texts: Sequence[str], form: TextForm, folder: Path) -> Ids:
    """Returns the ids of each document and an end token."""
    vocabulary = _opened(folder, form.end_token)
    kind = _kind(vocabulary)
    parts = [np.empty(0, kind)]
    for first in range(0, len(texts), AT_ONCE):  # Python's lists of numbers take twenty times the memory
        ids = vocabulary.encode(texts[first : first + AT_ONCE], threads=1)
        count = sum(map(len, ids)) + len(ids)
        parts.append(np.fromiter(chain.from_iterable((*of, vocabulary.eos_id) for of in ids), kind, count))
    return np.concatenate(parts)


def _kind(vocabulary: AnyVocabulary) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if len(vocabulary) > 65_536 else np.uint16


@lru_cache(maxsize=2)
def _opened(folder: Path, end_token: str | None) -> AnyVocabulary:
    return read_vocabulary(vocabulary_file(folder), end_token)
