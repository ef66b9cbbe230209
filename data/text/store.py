"""Reads a prepared text: token ids in memory-mapped files.

store.json              the pieces and how many tokens of each are trained on and held out; written last
source.model or tokenizer.json
defects.json            what was found when the store was made
<piece>.train.npy, <piece>.dev.npy      uint16 or uint32: the ids of each document and an end token
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..cache import mapped_array
from ..kept_vocabularies import read_vocabulary, vocabulary_file
from ..source import fingerprint_of

FORMAT = 1  # raised when the same parameters would give other bytes
SPLITS = ("train", "dev")


class TokenFiles:
    """Holds one long sequence of token ids that lies in several files.

    Args:
        paths: of the files, in order.
        lengths: tokens of each.
    """

    def __init__(self, paths: Sequence[Path], lengths: Sequence[int]) -> None:
        self._paths = paths
        self._ends = np.cumsum([0, *lengths])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        """Returns the ids at these places."""
        flat = places.reshape(-1)
        file_of = np.searchsorted(self._ends, flat, side="right") - 1
        ids = np.empty(len(flat), np.int64)
        for number in np.unique(file_of).tolist():
            mine = file_of == number
            ids[mine] = mapped_array(self._paths[number])[flat[mine] - self._ends[number]]
        return ids.reshape(places.shape)


class TextStore:
    """Opens a prepared text; reads neither the tokens nor, with SentencePiece, anything large.

    Attributes:
        source_vocabulary, target_vocabulary: of the ids; one object.
        train, dev: the tokens.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.description = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        self.source_vocabulary = read_vocabulary(vocabulary_file(folder), self.description["end_token"])
        self.target_vocabulary = self.source_vocabulary
        self.train, self.dev = (self._tokens(split) for split in SPLITS)

    def _tokens(self, split: str) -> TokenFiles:
        counts = {piece["name"]: piece[split] for piece in self.description["pieces"] if piece[split]}
        return TokenFiles([self.folder / f"{name}.{split}.npy" for name in counts], list(counts.values()))

    def fingerprint(self) -> str:
        """Returns a digest of the vocabulary and of all tokens that are trained on."""
        digests = json.dumps([piece["digest"] for piece in self.description["pieces"] if piece["train"]]).encode()
        return fingerprint_of(digests, vocabulary_file(self.folder).read_bytes())
