"""Yields a test set for a trained model, with the run's own vocabulary: `gpipe-eval RUN test=FILE|FOLDER`.

Nothing is prepared or kept, and nothing is trained on: `train` yields one mini-batch, which shows the shapes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ConfigurationError
from .defects import Defects
from .parallel.folders import pairs_to_test
from .parallel.pieces import read_pieces, readable
from .source import Batch, Report
from .store import HeldOutPair
from .text.files import documents, find_texts, in_short, read_text
from .translation import PairSource
from .vocabulary import EXAMPLE, PAD, AnyVocabulary, VocabularySource, read_both, read_vocabulary, vocabulary_file
from .windows import WindowSource

AT_ONCE, PIECE = 50_000, 2**24  # lines and bytes that are read at a time


class PairsToTest(PairSource):
    """Yields the sentence pairs of files of any form that `parallel_text` reads, all of each language.

    Args:
        test: a file, or a folder; in a folder those that are named test, if there are any.
        vocabularies: the folder of the run's vocabularies.
        target: the language of the translations.
        languages: source languages of the run; the only one is that of a file whose name says none.
        columns: names of source and target in records; None: the codes of the languages.
        max_length: longer pairs are left out, and counted.
    """

    def __init__(
        self,
        test: str,
        vocabularies: str,
        target: str = "en",
        languages: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        max_length: int = 96,
    ) -> None:
        super().__init__(1, None, 1.0, max_length, None, 0, "test")
        self._test, self._vocabularies, self._target = Path(test), Path(vocabularies), target
        self._only = languages[0] if languages is not None and len(languages) == 1 else None
        self._columns = None if columns is None else (columns[0], columns[1])

    def prepare(self, report: Report) -> None:
        """Reads the pairs.

        Raises:
            ConfigurationError: there are none, or their language is not known.
        """
        self.source_vocabulary, self.target_vocabulary = read_both(self._vocabularies)
        pairs, defects = list[HeldOutPair](), Defects()
        for files in pairs_to_test(self._test, self._target, self._only, self._columns):
            for piece in read_pieces(files, AT_ONCE):
                lines, found = readable(piece, self._max_length)
                defects.update(found, strict=False)
                pairs += (HeldOutPair(files.language, len(pairs), line.source, line.target) for line in lines)
        if not pairs:
            raise ConfigurationError(
                f"test={self._test}: no pair of texts in it ({defects.in_words() or 'it is empty'})"
            )
        counts = Counter(pair.language for pair in pairs)
        told = ", ".join(f"{count:,} from {code}" for code, count in counts.most_common(8))
        left_out = f"; left out: {defects.in_words()}" if defects.counts else ""
        report(f"pairs of test={self._test} ({told}{', …' * (len(counts) > 8)}{left_out})", len(pairs), len(pairs))
        pairs.sort(key=lambda pair: pair.language)
        self._store = TestPairs(pairs, self._vocabularies, self.source_vocabulary, self.target_vocabulary)  # type: ignore[assignment]

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields the one mini-batch."""
        tokens = torch.full(EXAMPLE, PAD)
        yield Batch([((tokens, tokens), (tokens,))] * M, None)


class TestPairs:
    """Holds pairs as `PairSource` reads them from a store."""

    def __init__(
        self,
        pairs: Sequence[HeldOutPair],
        folder: Path,
        source_vocabulary: AnyVocabulary,
        target_vocabulary: AnyVocabulary,
    ) -> None:
        self._pairs, self.folder = pairs, folder
        self.source_vocabulary, self.target_vocabulary = source_vocabulary, target_vocabulary

    def held_out(self, split: str) -> Iterator[HeldOutPair]:
        """Yields all pairs, language after language."""
        return iter(self._pairs)


class TextToTest(WindowSource, VocabularySource):
    """Yields all windows of a text, for the perplexity of a language model.

    Args:
        test: a file, or a folder; in a folder those that are named test, if there are any.
        vocabularies: the folder of the run's vocabulary.
        document, json_key, end_token, sequence_length, batch_size, pad_id: as in `TextFilesSource`.
    """

    def __init__(
        self,
        test: str,
        vocabularies: str,
        document: str = "blank_line",
        json_key: str = "text",
        end_token: str | None = None,
        sequence_length: int = 1024,
        batch_size: int = 32,
        pad_id: int = -100,
    ) -> None:
        super().__init__(sequence_length, batch_size, 0, pad_id)
        self.pad_id, self._test, self._form = pad_id, test, (document, json_key)
        self._ends = [b"\n\n", b"\n"] if document == "blank_line" else [b"\n"]
        vocabulary = read_vocabulary(vocabulary_file(Path(vocabularies)), end_token)
        self.source_vocabulary = self.target_vocabulary = vocabulary
        self.eos_id = vocabulary.eos_id

    def prepare(self, report: Report) -> None:
        """Reads and encodes the text.

        Raises:
            ConfigurationError: there is none.
        """
        splits = find_texts(self._test, "test", None)
        files = splits.get("test") or list(chain.from_iterable(splits.values()))
        defects, ids = Defects(), list[int]()
        for path in files:
            for piece in read_text(path, PIECE, self._ends):
                texts = [document.text for document in documents(piece, *self._form, defects)]
                for encoded in self.source_vocabulary.encode(texts):
                    ids += [*encoded, self.eos_id]
        if len(ids) < 2:
            raise ConfigurationError(f"test={self._test}: no text in it ({defects.in_words() or 'it is empty'})")
        self._held_out = np.array(ids)
        report(f"tokens of test={self._test} ({in_short([path.name for path in files])})", len(ids), len(ids))

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields the one mini-batch."""
        tokens = torch.full((1, self._length), self.eos_id)
        yield Batch([((tokens,), (tokens,))] * M, None)
