"""Yields windows of your own text, for language models: `data=text data.root=FOLDER`."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ...errors import ConfigurationError
from ...json_files import read_json
from ...typed_section import Count, Examples, Seed, Vocabulary
from ..cache import made_folder, open_array
from ..prepared import PreparedSource, digest_of, stat_of, worker_count
from ..source import Report, fingerprint_of
from ..store import token_kind
from ..tree import in_short
from ..vocabulary import BOS, Normalization, end_beside, file_named, read_vocabulary, require_room, vocabulary_file
from ..windows import WindowSource
from .files import Ends, find_texts
from .preparation import FORMAT, SPLITS, TextDescription, TextForm, prepare_text

log = logging.getLogger(__name__)

PIECE = 2**24  # bytes of text that one process takes at a time


class TextStore:
    """Opens a prepared text; reads neither the tokens nor, with SentencePiece, anything large.

    Attributes:
        source_vocabulary, target_vocabulary: the vocabulary of the ids; one object.
        train, dev: the tokens.
        defects: found when the store was made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.description = read_json(folder / "store.json", TextDescription)
        self.source_vocabulary = read_vocabulary(vocabulary_file(folder), self.description["end_token"])
        self.target_vocabulary, self.defects = self.source_vocabulary, self.description["defects"]
        self.train, self.dev = (open_array(folder / split, token_kind(self.source_vocabulary)) for split in SPLITS)

    def fingerprint(self) -> str:
        """Returns a digest of the vocabulary and of all tokens that are trained on."""
        digests = json.dumps(self.description["digests"]).encode()
        return fingerprint_of(digests, vocabulary_file(self.folder).read_bytes())


class TextFilesSource(WindowSource, PreparedSource):
    """Reads text files, as one sequence of documents with an end token after each.

    Args:
        root: a file or a folder, see `files.find_texts`; files named dev are evaluated on, those named test not read.
        files: a pattern of the paths in these folders, as "**/*.py"; None: files with the endings of text.
        document: end of a document of plain text: "blank_line", "line" or "file". A record is a document.
        json_key: name of the text in a line of JSON or a row of Parquet.
        held_out: share of the documents that are held out, drawn by a hash of each, where no file is named dev.
        evaluation_root: a file or folder that is held out, in place of files of `root` or a share of it.
        tokenizer: a run, a tokenizer.json or a SentencePiece .model; None: SentencePiece is trained on the text.
        end_token: the text of the tokenizer's token that ends a document; None: found by its usual names.
        vocabulary: pieces of the SentencePiece vocabulary, or the most ids that a tokenizer may have.
        smaller_vocabulary: True: fewer pieces where the text supports fewer; False: it is refused.
        character_coverage: share of the text's characters that get pieces of their own.
        normalization: rule by which the text changes before it becomes pieces, see `Normalization`.
        preparation_workers: processes that prepare the text; None: one per core.
        sequence_length, batch_size, seed, pad_id, evaluation_windows: see `WindowSource`.
        corpus_seed: decides the draw of held-out documents.
        cache_dir: folder of the store; None: `$GPIPE_CACHE` or `~/.cache/gpipe`.

    Raises:
        ConfigurationError: the tokenizer is missing or has more ids than `vocabulary`.
    """

    _store: TextStore
    bos_id = BOS

    def __init__(
        self,
        root: str | None,
        document: Ends = "blank_line",
        json_key: str = "text",
        held_out: Annotated[float, Field(ge=0, le=0.9)] = 0.01,
        evaluation_root: str | None = None,
        tokenizer: str | None = None,
        end_token: str | None = None,
        vocabulary: Vocabulary = 32_000,
        smaller_vocabulary: bool = True,
        character_coverage: Annotated[float, Field(ge=0.98, le=1)] = 0.9995,
        normalization: Normalization = "nmt_nfkc",
        preparation_workers: Count | None = None,
        sequence_length: Count = 1024,
        batch_size: Examples = 32,
        pad_id: int = -100,
        evaluation_windows: Count | None = 256,
        corpus_seed: Seed = 0,
        seed: int = 0,
        cache_dir: str | None = None,
        files: str | None = None,
    ) -> None:
        super().__init__(sequence_length, batch_size, seed, pad_id, evaluation_windows)
        self.pad_id, self._vocabulary = pad_id, vocabulary
        self._root, self._evaluation_root, self._pattern = root, evaluation_root, files
        self._workers, self._cache_dir = preparation_workers, cache_dir
        if tokenizer is not None:
            tokenizer = str(file_named(tokenizer))
            end_token = end_token or end_beside(Path(tokenizer))
            require_room("vocabulary", vocabulary, tokenizer, read_vocabulary(Path(tokenizer), end_token))
        share = held_out if evaluation_root is None else 0.0
        pieces = (vocabulary, character_coverage, smaller_vocabulary, normalization)
        self.form = TextForm(document, json_key, share, corpus_seed, tokenizer, end_token, *pieces, PIECE)

    def prepare(self, report: Report) -> None:
        """Makes the store unless it is in the cache, and opens it.

        Raises:
            ConfigurationError: files are missing or no text, or there is too little text.
        """
        files, held_out = self._files()
        # A share of the documents is held out only where no whole files are.
        form = replace(self.form, held_out=0.0) if held_out else self.form
        store = self._opened(form, files, held_out, report)
        self._use(store)
        self._training, self._held_out = store.train, store.dev
        self.eos_id = store.source_vocabulary.eos_id
        # A vocabulary that was trained here may have become smaller than asked for.
        trained = {"vocabulary": (self._vocabulary, store.source_vocabulary)} if self.form.tokenizer is None else {}
        documents = store.description["documents"]
        self._warn(f"text: {documents:,} documents are used: lines", trained)
        self._require_a_window()
        if len(store.dev) < 2:
            raise ConfigurationError(
                f"none of the {documents:,} documents of data.root={self._root} is held out by "
                f"data.held_out={self.form.held_out}: raise it, name other text as data.evaluation_root=FILE, or use "
                "data.document=line if each line is a document"
            )

    def _files(self) -> tuple[list[Path], list[Path]]:
        """Returns the files to train on, and those that are held out as a whole; logs which are neither."""
        splits = find_texts(self._root, "data.root", self._pattern)
        files, held_out, others = (splits.get(split, []) for split in ("train", "dev", "test"))
        if not files:
            raise ConfigurationError(
                f"data.root={self._root} has text to test on alone, as {(held_out + others)[0].name}: name other text, "
                "or data.files='**/*', which trains on all"
            )
        if self._evaluation_root is not None:
            others = held_out + others
            named = find_texts(self._evaluation_root, "data.evaluation_root", self._pattern)
            held_out = [file for split, its in named.items() if split != "train" or len(named) == 1 for file in its]
        if len(splits) > 1:
            names = [in_short([file.name for file in of]) for of in (files, held_out, others)]
            log.warning("data.root=%s: trained on: %s; evaluated on: %s; not read: %s", self._root, *names)
        return files, held_out

    def _opened(self, form: TextForm, files: list[Path], held_out: list[Path], report: Report) -> TextStore:
        """Makes the store of these files unless it is in the cache, and opens it."""

        def make(draft: Path) -> None:
            workers = worker_count([*files, *held_out], self._workers)
            prepare_text(form, files, held_out, draft, workers, report)

        given = [] if form.tokenizer is None else [Path(form.tokenizer)]
        stats = [[stat_of(file) for file in group] for group in (files, held_out, given)]
        name = f"text-{digest_of(FORMAT, asdict(form), stats)}"
        return TextStore(made_folder(self._cache_dir, name, make, report))
