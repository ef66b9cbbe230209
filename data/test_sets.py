"""Yields a test set for a trained model, with the run's own vocabulary: `gpipe-eval RUN test=FILE|FOLDER`.

Nothing is prepared or kept, and nothing is trained on: `train` yields one mini-batch, which shows the shapes.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ConfigurationError
from .defects import Defects
from .parallel.folders import pairs_to_test
from .parallel.preparation import held_out_pair, read_pieces, readable
from .parallel.source import ParallelTextSource
from .source import Batch, Report
from .store import HeldOutPair
from .text.files import documents, find_texts
from .text.source import TextFilesSource
from .tree import in_short
from .vocabulary import EXAMPLE, PAD, read_both, read_vocabulary, vocabulary_file


class PairsToTest(ParallelTextSource):
    """Yields the sentence pairs of files of any form that `parallel_text` reads, all of each language.

    Args:
        test: a file, or a folder; in a folder those that are named test, if there are any.
        vocabularies: the folder of the run's vocabularies.
        keys: `target`, `languages`, `columns` and `max_length` of the run. If there is one language, files whose names
            say none are of it. Longer pairs are left out, and counted.
    """

    def __init__(self, test: str, vocabularies: str, **keys: Any) -> None:
        super().__init__(evaluation_split="test", evaluation_per_language=None, **keys)
        self._test, self._folder = Path(test), Path(vocabularies)

    def prepare(self, report: Report) -> None:
        """Reads the pairs.

        Raises:
            ConfigurationError: there are none, or their language is not known.
        """
        self.source_vocabulary, self.target_vocabulary = read_both(self._folder)
        pairs, defects, languages = list[HeldOutPair](), Defects(), self.text.languages
        only = languages[0] if languages is not None and len(languages) == 1 else None
        for files in pairs_to_test(self._test, self.text.target, only, self._columns):
            for piece in read_pieces(files, self.text.piece):
                pairs += (held_out_pair("test", piece, line) for line in readable(piece, self._max_length, defects))
        if not pairs:
            why = defects.in_words() or "it is empty"
            raise ConfigurationError(f"test={self._test}: no pair of texts in it ({why})")
        counts = Counter(pair.language for pair in pairs)
        told = ", ".join(f"{count:,} from {code}" for code, count in counts.most_common(8))
        left_out = f"; left out: {defects.in_words()}" if defects.counts else ""
        report(f"pairs of test={self._test} ({told}{', …' * (len(counts) > 8)}{left_out})", len(pairs), len(pairs))
        self._found_pairs = sorted(pairs, key=attrgetter("language"))

    def _held_out_pairs(self, split: str) -> Iterator[HeldOutPair]:
        return iter(self._found_pairs)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields one mini-batch, which shows the shapes."""
        tokens = torch.full(EXAMPLE, PAD)
        yield Batch([((tokens, tokens), (tokens,))] * M, None)


class TextToTest(TextFilesSource):
    """Yields all windows of a text, for the perplexity of a language model.

    Args:
        test: a file, or a folder; in a folder those that are named test, if there are any.
        vocabularies: the folder of the run's vocabulary.
        keys: those of the run that say how the text is read and divided, see `TextFilesSource`.
    """

    def __init__(self, test: str, vocabularies: str, **keys: Any) -> None:
        super().__init__(None, evaluation_windows=None, **keys)
        self._test, self._folder = test, Path(vocabularies)
        self.source_vocabulary = read_vocabulary(vocabulary_file(self._folder), self.form.end_token)
        self.target_vocabulary, self.eos_id = self.source_vocabulary, self.source_vocabulary.eos_id

    def prepare(self, report: Report) -> None:
        """Reads and encodes the text.

        Raises:
            ConfigurationError: there is none.
        """
        splits = find_texts(self._test, "test", None)
        files = splits.get("test") or list(chain.from_iterable(splits.values()))
        defects, ids = Defects(), list[int]()
        for path in files:
            for piece in self.form.pieces(path):
                texts = [*documents(piece, self.form.document, self.form.json_key, defects)]
                for encoded in self.source_vocabulary.encode(texts):
                    ids += [*encoded, self.eos_id]
        if len(ids) < 2:
            raise ConfigurationError(f"test={self._test}: no text in it ({defects.in_words() or 'it is empty'})")
        self._held_out = np.array(ids)
        report(f"tokens of test={self._test} ({in_short([path.name for path in files])})", len(ids), len(ids))

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields one mini-batch, which shows the shapes."""
        tokens = torch.full((1, self._length), self.eos_id)
        yield Batch([((tokens,), (tokens,))] * M, None)
