"""Reads text with the vocabularies of a run: a test set (`gpipe-eval RUN test=FILE|FOLDER`), or what a user types.

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
from .parallel.preparation import read_pieces, usable_lines
from .parallel.source import ParallelTextSource
from .source import Batch, HeldOutSample, Report, Source
from .text.files import documents, find_texts
from .text.source import TextFilesSource
from .tree import in_short
from .vocabulary import PAD, read_both, read_vocabulary, vocabulary_file

EXAMPLE = (8, 16)  # sentences and tokens of the only mini-batch, by which the model's costs are counted


class PairsOfRun(ParallelTextSource):
    """Yields the sentence pairs of files of any form that `parallel_text` reads, all of each language.

    Args:
        vocabularies: the folder of the run's vocabularies.
        test: a file, or a folder; in a folder those that are named test, if there are any; None: no pairs.
        keys: `target`, `languages`, `columns` and `max_length` of the run. If there is one language, files whose names
            say none are of it. Longer pairs are left out, and counted.

    Raises:
        ConfigurationError: a vocabulary is damaged.
    """

    typical_micro_batch = Source.typical_micro_batch

    def __init__(self, vocabularies: str, test: str | None = None, **keys: Any) -> None:
        super().__init__(evaluation_split="test", evaluation_per_language=None, **keys)
        self._test, self._folder, self._samples = test, Path(vocabularies), list[HeldOutSample]()
        self.source_vocabulary, self.target_vocabulary = read_both(self._folder)

    def prepare(self, report: Report) -> None:
        """Reads the pairs.

        Raises:
            ConfigurationError: there are none, or their language is not known.
        """
        if self._test is None:
            return
        samples, defects, languages = list[HeldOutSample](), Defects(), self.text.languages
        vocabularies = self.source_vocabulary, self.target_vocabulary
        only = languages[0] if languages is not None and len(languages) == 1 else None
        for files in pairs_to_test(Path(self._test), self.text.target, only, self._columns):
            for rows in read_pieces(files, self.text.piece):
                lines = usable_lines(files, rows, vocabularies, self._max_length, defects)
                samples += [HeldOutSample("test", files.language, line.source, line.target) for line, _ in lines]
        if not samples:
            why = defects.in_words() or "it is empty"
            raise ConfigurationError(f"test={self._test}: no pair of texts in it ({why})")
        counts = Counter(sample.language for sample in samples).most_common()
        told = in_short([f"{count:,} from {code}" for code, count in counts], 8)
        left_out = f"; left out: {defects.in_words()}" if defects.counts else ""
        report(f"pairs of test={self._test} ({told}{left_out})", len(samples), len(samples))
        self._samples = sorted(samples, key=attrgetter("language"))

    def _held_out_pairs(self, split: str) -> Iterator[HeldOutSample]:
        return iter(self._samples)

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yields one mini-batch, which shows the shapes."""
        tokens = torch.full(EXAMPLE, PAD)
        yield Batch([((tokens, tokens), (tokens,))] * M, None)


class TextOfRun(TextFilesSource):
    """Yields all windows of a text, for the perplexity of a language model.

    Args:
        vocabularies: the folder of the run's vocabulary.
        test: a file, or a folder; in a folder those that are named test, if there are any; None: no text.
        keys: those of the run that say how the text is read and divided, see `TextFilesSource`.

    Raises:
        ConfigurationError: the vocabulary is damaged.
    """

    typical_micro_batch = Source.typical_micro_batch

    def __init__(self, vocabularies: str, test: str | None = None, **keys: Any) -> None:
        super().__init__(None, evaluation_windows=None, **keys)
        self._test, self._folder = test, Path(vocabularies)
        self.source_vocabulary = read_vocabulary(vocabulary_file(self._folder), self.form.end_token)
        self.target_vocabulary, self.eos_id = self.source_vocabulary, self.source_vocabulary.eos_id

    def prepare(self, report: Report) -> None:
        """Reads and encodes the text.

        Raises:
            ConfigurationError: there is none.
        """
        if self._test is None:
            return
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
