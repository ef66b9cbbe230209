"""Trains and reads vocabularies, which encode and decode text.

A vocabulary is a SentencePiece unigram model (Kudo & Richardson, 2018), or a tokenizer.json. A model that translates
knows padding, the unknown piece, beginning and end by the ids 0 to 3; those of a vocabulary made elsewhere come after.
A language model has the ids of the file.
"""

import io
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any, Literal

import sentencepiece

from ..disk import read_bytes, refuse_pointer
from ..errors import ConfigurationError

PAD, UNKNOWN, BOS, EOS = SPECIAL = 0, 1, 2, 3
SIDES = ("source", "target")
SOURCE, TOKENIZER = "source.model", "tokenizer.json"  # of a text; of pairs the target's too, if it has its own
CONFIG = "tokenizer_config.json"  # beside a tokenizer.json; names its end token
FILES = (TOKENIZER, *(f"{side}{ending}" for side in SIDES for ending in (".model", ".json")), CONFIG)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line feeds
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|im_end|>", "[SEP]", "<|eot_id|>")  # of a document
BLANKS = str.maketrans("\t\n\r", "   ")  # inside a text

Normalization = Literal["identity", "nmt_nfkc"]
"""SentencePiece's rule by which texts change before they become pieces, for good: a decoded text has the changes."""


def train_vocabulary(
    sentences: Iterable[str],
    size: int,
    character_coverage: float = 1.0,
    key: str = "vocabulary",
    smaller: bool = False,
    normalization: Normalization = "nmt_nfkc",
) -> bytes:
    """Trains `size` pieces and returns the model; equal sentences in equal order give equal bytes.

    Digits are pieces of their own, because languages group them differently: 6.629.945 is 6,629,945.

    Args:
        sentences: texts; tabs and line breaks inside them become blanks.
        character_coverage: share of the text's characters that get pieces; the rest, the rarest, become unknown.
        key: the key under `data` that holds the size; for messages.
        smaller: True trains fewer pieces where the sentences support fewer.

    Raises:
        ConfigurationError: the sentences support fewer pieces than `size` and not `smaller`, or need more for their
            characters alone.
    """
    model = io.BytesIO()
    soft_limit: dict[str, Any] = {"hard_vocab_limit": False} if smaller else {}  # the model's bytes hold what is given
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(sentence.translate(BLANKS) for sentence in sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            **soft_limit,
            character_coverage=character_coverage,
            split_digits=True,
            normalization_rule_name=normalization,
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=BOS,
            eos_id=EOS,
            num_threads=2,  # fixed: sums of floats depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigurationError(_refusal(str(error), key, size, character_coverage)) from error
    return model.getvalue()


def _refusal(error: str, key: str, size: int, coverage: float) -> str:
    """Returns the message that refuses a vocabulary size: SentencePiece's error, in terms of the keys under `data`."""
    if found := re.search(r"set it to a value <= (\d+)", error):
        use = f"use data.{key}={found[1]}, or data.smaller_vocabulary=true to train as many as there are"
        return f"data.{key}={size}, but this corpus supports {found[1]} pieces: {use}"
    if found := re.search(r"required_chars. \d+ vs (\d+)", error):
        return (
            f"data.{key}={size}, but the characters of this corpus alone need {found[1]} pieces: use data.{key}="
            f"{found[1]} or more, or lower data.character_coverage={coverage}, and the rarest are unknown"
        )
    reason = error.rpartition("] ")[2].strip() or error  # before it come lines of its source
    return f"data.{key}={size}: SentencePiece could not train a vocabulary on this corpus: {reason}"


def warn_if_smaller(key: str, wanted: int, vocabulary: Sized, log: logging.Logger) -> None:
    """Warns if a vocabulary has fewer pieces than the key under `data` asks for."""
    if (pieces := len(vocabulary)) < wanted:
        unused = (
            f"{wanted - pieces:,} rows of the model's tables stay unused: use data.{key}={pieces} for a smaller model"
        )
        log.warning("data.%s=%d, but the text supports %s pieces only, so %s", key, wanted, f"{pieces:,}", unused)


class Vocabulary:
    """Turns texts into ids and back with a SentencePiece model.

    Args:
        model: its bytes.
        name: the file's name, for messages.
        of_pairs: True for translation: ids of a model made elsewhere come after `SPECIAL`, and it needs no end piece.

    Attributes:
        first: id of its first piece.
        eos_id: id of the end token.

    Raises:
        ConfigurationError: it is no such model, or has no end piece.
    """

    def __init__(self, model: bytes, name: object = "the vocabulary", of_pairs: bool = False) -> None:
        try:
            self._pieces = pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
            special = pieces.pad_id(), pieces.unk_id(), pieces.bos_id(), pieces.eos_id()
        except RuntimeError as error:
            raise ConfigurationError(f"{name} is damaged, or no SentencePiece model") from error
        self.first = len(SPECIAL) if of_pairs and special != SPECIAL else 0
        self.eos_id: int = EOS if of_pairs else pieces.eos_id()
        if self.eos_id < 0:
            raise ConfigurationError(f"{name} has no end piece, which ends a document: use one trained with eos_id")

    def __len__(self) -> int:
        return self.first + int(self._pieces.get_piece_size())

    def encode(self, texts: Sequence[str], threads: int = 2) -> list[list[int]]:
        """Returns the ids of each text, without beginning and end tokens. Tabs and line breaks count as blanks."""
        plain = [text.translate(BLANKS) for text in texts]
        return _moved(self._pieces.encode(plain, out_type=int, num_threads=threads), self.first)

    def decode(self, ids: Sequence[int], after: int = 0) -> str:
        """Returns the text up to the first end token. Control characters, which a terminal would obey, become U+FFFD.

        Args:
            after: number of ids of a prompt before them, in which an end token ends nothing.
        """
        # A model may know more ids than there are pieces: data.smaller_vocabulary.
        known = (i - self.first for i in _before_end(ids, self.eos_id, after) if self.first <= i < len(self))
        kept = [piece for piece in known if not self._pieces.is_control(piece)]
        return CONTROL.sub("\ufffd", str(self._pieces.decode(kept)))


class TokenizerFile:
    """Turns texts into ids and back as a tokenizer.json says; no special tokens are added.

    Args:
        path: path of the file.
        end_token: the text of the token that ends a document; None: that of `end_beside`, or one of `ENDS`.
        of_pairs: True for translation: the file's ids come after `SPECIAL`, and it needs no end token.

    Attributes:
        first: id of its first token.
        eos_id: id of the end token.

    Raises:
        ConfigurationError: the library or the file is missing, it is no such file, or has no such token.
    """

    def __init__(self, path: Path, end_token: str | None = None, of_pairs: bool = False) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # there is a process for each core
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_buffer(read_bytes(path))
        except ImportError as error:
            raise ConfigurationError(
                f"data.tokenizer={path} needs the tokenizers library: pip install 'gpipe-cli[tokenizers]'"
            ) from error
        except Exception as error:  # the library raises no error of its own kind
            raise ConfigurationError(
                f"data.tokenizer={path} is no tokenizer.json, SentencePiece .model or run: {error}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.first = len(SPECIAL) if of_pairs else 0
        if of_pairs:
            self.eos_id = EOS
            return
        named = end_token or end_beside(path)
        wanted = ENDS if named is None else (named,)
        found = [number for name in wanted if (number := self._tokenizer.token_to_id(name)) is not None]
        if not found:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            raise ConfigurationError(
                f"data.tokenizer={path} has no token {' or '.join(wanted)} to end a document with: name one as "
                f"data.end_token; its special tokens: {', '.join(special) or 'none'}"
            )
        self.eos_id = found[0]

    def __len__(self) -> int:
        """Returns one more than the largest id."""
        return self.first + 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Returns the ids of each text, without special tokens."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return _moved([one.ids for one in encoded], self.first)

    def decode(self, ids: Sequence[int], after: int = 0) -> str:
        """Returns the text as `Vocabulary.decode` does. Special tokens before the end stay in it as text."""
        kept = [token - self.first for token in _before_end(ids, self.eos_id, after) if token >= self.first]
        return CONTROL.sub("\ufffd", self._tokenizer.decode(kept, skip_special_tokens=False))


def end_beside(path: Path) -> str | None:
    """Returns the end token that a tokenizer_config.json beside a vocabulary names, None without one."""
    try:
        token = json.loads((path.parent / CONFIG).read_bytes())["eos_token"]
        return str(token["content"] if isinstance(token, dict) else token)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _moved(texts: list[list[int]], by: int) -> list[list[int]]:
    """Returns the ids of each text, with a number added to each id."""
    return [[number + by for number in ids] for ids in texts] if by else texts


def _before_end(ids: Sequence[int], end: int, prompt_length: int) -> list[int]:
    """Returns the ids up to the first end token behind the prompt, all if there is none.

    Args:
        end: id of the end token.
        prompt_length: the first ids, in which an end token ends nothing.
    """
    kept = [int(number) for number in ids]
    return kept[: kept.index(end, prompt_length)] if end in kept[prompt_length:] else kept


# -- in files ----------------------------------------------------------------------------------------------------------

AnyVocabulary = Vocabulary | TokenizerFile


def vocabulary_file(folder: Path, side: str = "source") -> Path:
    """Returns the path of a folder's vocabulary: of a text, or of one side of pairs.

    Where there is none, it is the path of a missing file, which the error of whoever reads it then names.
    """
    names = (f"{side}.model", f"{side}.json", *FILES)
    return next((folder / name for name in names if (folder / name).is_file()), folder / SOURCE)


def file_named(name: str, side: str = "source") -> Path:
    """Returns the file that data.tokenizer names: itself, or that of one side in a run's folder."""
    path = Path(name).expanduser()
    folder = path / "vocabulary" if (path / "vocabulary").is_dir() else path
    return vocabulary_file(folder, side) if path.is_dir() else path


def read_vocabulary(path: Path, end_token: str | None = None, of_pairs: bool = False) -> AnyVocabulary:
    """Returns the vocabulary of a file: a tokenizer.json, or a SentencePiece .model.

    Args:
        end_token, of_pairs: arguments of `TokenizerFile`.

    Raises:
        ConfigurationError: it is neither, or damaged.
    """
    if path.is_file():
        refuse_pointer(path)
        if path.suffix == ".model":
            return Vocabulary(read_bytes(path), path, of_pairs)
    return TokenizerFile(path, end_token, of_pairs)


def read_both(folder: Path) -> tuple[AnyVocabulary, AnyVocabulary]:
    """Returns the vocabularies of sources and of targets in a folder; one object if they share one."""
    source, target = (vocabulary_file(folder, side) for side in SIDES)
    of_source = read_vocabulary(source, of_pairs=True)
    return of_source, of_source if target == source else read_vocabulary(target, of_pairs=True)


def require_room(key: str, size: int, tokenizer: object, vocabulary: Sized) -> None:
    """Raises ConfigurationError if a vocabulary has more ids than the key under `data` that the model reads."""
    if (ids := len(vocabulary)) > size:
        raise ConfigurationError(
            f"data.{key}={size}, but data.tokenizer={tokenizer} has ids up to {ids - 1}: use data.{key}={ids}, which "
            "the model reads"
        )
