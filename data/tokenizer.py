"""Reads a tokenizer.json with the tokenizers library, in place of a vocabulary of our own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigurationError

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]", "<|eot_id|>")  # of a document
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line feeds
INSTALL = "pip install 'gpipe-cli[tokenizers]'"


class TokenizerFile:
    """Turns texts into ids and back as the file says; no special tokens are added.

    Args:
        path: of the file.
        end_token: the text of the token that ends a document; None: one of `ENDS` that the file has.

    Raises:
        ConfigurationError: the library or the file is missing, it is no such file, or has no such token.
    """

    def __init__(self, path: Path, end_token: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigurationError(f"data.tokenizer={path} needs the tokenizers library: {INSTALL}") from error
        if not path.is_file():
            raise ConfigurationError(
                f"data.tokenizer={path}: there is no such file. Use a tokenizer.json, or RUN/vocabulary/source.model"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no error of its own kind
            raise ConfigurationError(f"data.tokenizer={path} is no tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        wanted = ENDS if end_token is None else (end_token,)
        found = [number for name in wanted if (number := self._tokenizer.token_to_id(name)) is not None]
        if not found:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            raise ConfigurationError(
                f"data.tokenizer={path} has no token {' or '.join(wanted)} to end a document with: name one, as "
                f"data.end_token='{special[0] if special else '.'}'; its special tokens: {', '.join(special) or 'none'}"
            )
        self.eos_id: int = found[0]

    def __len__(self) -> int:
        """Returns one more than the largest id."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Returns the ids of each text, without special tokens."""
        return [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text up to the first end token; control characters, which a terminal would obey, as U+FFFD."""
        kept = list(ids)[: list(ids).index(self.eos_id)] if self.eos_id in ids else list(ids)
        return CONTROL.sub("\ufffd", self._tokenizer.decode([int(number) for number in kept]))
