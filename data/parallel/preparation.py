"""Makes a store of a folder of parallel text, with several processes.

Lines are counted and sampled; vocabularies are trained; pieces of text become ids, divided among shards; the shards are
shuffled. All of this happens in a folder of the cache that becomes the store at the end.
"""

import glob
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, count

import numpy as np

from ...disk import whole_file
from ...errors import ConfigurationError
from ..cache import open_array, save_array
from ..defects import KINDS, Defect, Defects
from ..prepared import WORK, RunAll, in_processes
from ..sampling import temperature_shares
from ..source import Report
from ..store import Numbers, StoreWriter
from ..vocabulary import train_vocabulary
from .folders import PairFiles
from .pieces import (
    Draft,
    HeldOut,
    Piece,
    encode,
    is_wide,
    merge,
    pair_digest,
    read_pieces,
    readable,
    scan,
    short_enough,
)

VOCABULARY_PAIRS = 1_000_000  # sentence pairs that vocabularies are trained on: more cost time and memory
VOCABULARY_TEMPERATURE = 5.0  # of their sampling

Corpora = dict[str, dict[PairFiles, int]]
"""By language: a number for each corpus that is trained on."""


@dataclass
class Preparation:
    """Makes one store.

    Attributes:
        draft: names the files.
        pairs: the files to read.
        strict: whether defects are refused.
        workers: number of processes.
    """

    draft: Draft
    pairs: Sequence[PairFiles]
    strict: bool
    workers: int
    report: Report
    _defects: Defects = field(default_factory=Defects)
    _held_out: list[HeldOut] = field(default_factory=list)
    _samples: dict[PairFiles, list[tuple[str, str]]] = field(default_factory=dict)
    _done: int = 0  # lines that are encoded

    def __post_init__(self) -> None:
        self.text = self.draft.text

    def run(self) -> None:
        """Does all steps.

        Raises:
            ConfigurationError: a defect is to be refused, or a vocabulary size does not fit the text.
        """
        with in_processes(self.workers) as run_all:
            lines = self._scan(run_all)
            self._train_vocabularies(lines)
            self._read_held_out(lines)
            total = sum(sum(of.values()) for of in lines.values())
            self._writer = StoreWriter(self.draft.folder, is_wide(self.draft))
            for code, of in lines.items():
                self._encode(run_all, code, of, total)
        self._write_held_out()
        self._defects.write(self.draft.folder, total)
        text = {key: value for key, value in asdict(self.text).items() if key != "sizes"}
        drawn = Counter(split for split, language, *_ in self._held_out if split in text["lacking"].get(language, ()))
        made_of = {"parallel_text": text, "drawn": {split: drawn[split] for split in sorted(drawn)}}
        self._writer.finish(self.text.sizes.block, made_of)
        self.report("parallel text: languages", len(lines), len(lines))

    def _scan(self, run_all: RunAll) -> Corpora:
        """Returns the pairs of lines of each corpus to train on.

        Raises:
            ConfigurationError: a file is empty, or two that are read line by line have not equally many.
        """
        lines: Corpora = {}
        self.report("parallel text: counting lines", 0, len(self.pairs))
        for done, (pair, (counts, sample)) in enumerate(zip(self.pairs, run_all(scan, self._scan_jobs()), strict=True)):
            self.report("parallel text: counting lines", done, len(self.pairs))
            if not all(counts):
                what = f"has no line of '{pair.language}'" if pair.language_column else "is empty"
                raise ConfigurationError(f"{pair.files[counts.index(0)]} {what}: put its text there, or remove it")
            if len(set(counts)) > 1:
                both = f"{pair.source} has {counts[0]:,} lines, {pair.target} has {counts[1]:,}"
                raise ConfigurationError(f"{both}: they are read line by line, so mend or remove both")
            if pair.split == "train":
                lines.setdefault(pair.language, {})[pair] = counts[0]
                self._samples[pair] = sample
        with_dev = {pair.language for pair in self.pairs if pair.split == "dev"}
        self._name_without_dev(lines.keys() - with_dev - self.text.lacking.keys())
        return lines

    def _scan_jobs(self) -> Iterator[tuple[PairFiles, int, int]]:
        """Yields the jobs; a corpus' sample is twice its share of the vocabulary's pairs, judged by file size."""
        sizes: Corpora = {}
        for pair in self.pairs:
            if pair.split == "train":
                sizes.setdefault(pair.language, {})[pair] = pair.source.stat().st_size + 1
        shares = self._shares(sizes)
        for pair in self.pairs:
            wanted = min(int(2 * shares[pair] * VOCABULARY_PAIRS) + 1, VOCABULARY_PAIRS) if pair in shares else 0
            yield pair, wanted, self.text.piece

    def _shares(self, sizes: Corpora) -> dict[PairFiles, float]:
        """Returns each corpus' share of the vocabularies' pairs: its part of the share of its language."""
        totals = [sum(of.values()) for of in sizes.values()]
        drawn = temperature_shares(totals, VOCABULARY_TEMPERATURE)
        languages = zip(drawn, totals, sizes.values(), strict=True)
        return {pair: share * (size / total) for share, total, of in languages for pair, size in of.items()}

    def _train_vocabularies(self, lines: Corpora) -> None:
        wanted = self.text.vocabularies
        if wanted.shared:
            sides = [("source_vocabulary", wanted.source, [0, 1])]
        else:
            sides = [("source_vocabulary", wanted.source, [0]), ("target_vocabulary", wanted.target, [1])]
        refused = []
        for (key, size, columns), model, given in zip(sides, self.draft.models, wanted.given, strict=False):
            if given is not None:
                shutil.copyfile(given, model)
                continue
            sentences = [pair[column] for pair in self._vocabulary_pairs(lines) for column in columns]
            if not sentences:
                _, found = readable(next(read_pieces(self.pairs[0], self.text.piece)), self.text.max_length)
                first = found.examples[0] if found.examples else f"the first file is {self.pairs[0].source}"
                raise ConfigurationError(f"{self.text.named}: no pair of lines has text on both sides; {first}")
            side = key.replace("_", " ")
            self.report(f"parallel text: {side}, {size:,} pieces by {len(sentences):,} sentences", 0, 0)
            try:
                how = (wanted.character_coverage, key, wanted.smaller, wanted.normalization)
                made = train_vocabulary(sentences, size, *how)
                with whole_file(model) as draft:
                    draft.write_bytes(made)
            except ConfigurationError as error:
                refused.append(str(error))
        self._samples.clear()
        if refused:
            raise ConfigurationError("\n".join(refused))

    def _vocabulary_pairs(self, lines: Corpora) -> Iterator[tuple[str, str]]:
        """Yields pairs drawn with temperature from the samples; pairs of small languages may repeat."""
        total = min(VOCABULARY_PAIRS, sum(sum(of.values()) for of in lines.values()))
        for pair, share in self._shares(lines).items():
            sample = self._samples[pair]
            count = max(1, int(share * total)) if sample else 0
            places = (i * len(sample) // count if count < len(sample) else i % len(sample) for i in range(count))
            yield from (sample[place] for place in places)

    def _encode(self, run_all: RunAll, code: str, lines: Mapping[PairFiles, int], total: int) -> None:
        """Makes ids of a language's pieces, then shards of pieces."""
        found, read, bounds = Defects(), list[int](), list[Numbers]()
        shards = max(1, -(-sum(lines.values()) // self.text.sizes.shard))
        self.report("parallel text: token ids", self._done, total)

        def jobs() -> Iterator[tuple[Draft, Piece, int]]:
            numbers = count()
            for piece in chain.from_iterable(read_pieces(pair, self.text.piece, numbers) for pair in lines):
                read.append(len(piece.rows))
                yield self.draft, piece, shards

        for encoded in run_all(encode, jobs()):
            self._done += read[len(bounds)]
            self.report("parallel text: token ids", self._done, total)
            found.update(encoded.defects, self.strict)
            self._held_out += encoded.held_out
            bounds.append(encoded.bounds)
        self._defects.update(found, self.strict)
        self._merge(run_all, code, np.stack(bounds))
        for left in (self.draft.folder / WORK).glob(f"{glob.escape(code)}-??????.*"):
            left.unlink()
        if not self._writer.languages[code].pairs:
            files = " and ".join(str(file) for pair in lines for file in pair.files)
            raise ConfigurationError(f"{files}: no pair of language '{code}' is left: {found.in_words()}")

    def _merge(self, run_all: RunAll, code: str, bounds: Numbers) -> None:
        """Makes shuffled shards of a language and writes them to the store. `bounds`: in each piece, see `encode`."""
        of_shards = ((self.draft, code, n, bounds[:, :, n : n + 2]) for n in range(bounds.shape[2] - 1))
        for shard, _ in enumerate(run_all(merge, of_shards)):
            files = (self.draft.piece(code, shard, f"shuffled_{kind}") for kind in ("tokens", "lengths"))
            self._writer.add(code, *map(open_array, files))
            self.report("parallel text: shards", shard + 1, 0)

    def _read_held_out(self, languages: Iterable[str]) -> None:
        """Reads the pairs of dev and test files and writes their digests; unusable lines are dropped or refused."""
        digests: dict[str, list[int]] = {language: [] for language in languages}
        for pair in (pair for pair in self.pairs if pair.split != "train"):
            for piece in read_pieces(pair, self.text.piece):
                usable, defects = readable(piece, self.text.max_length)
                usable, _, _ = short_enough(self.draft, piece, usable, defects)
                self._defects.update(defects, self.strict)
                for place, *texts in usable:
                    self._held_out.append((pair.split, pair.language, piece.places[place], texts[0], texts[1]))
                    digests[pair.language].append(pair_digest(*texts))
        for language, of_language in digests.items():
            save_array(self.draft.held_out(language), np.array(of_language, np.uint64))

    def _write_held_out(self) -> None:
        """Writes the pairs of held-out files, and after them those of training files that are held out."""
        for split in ("dev", "test"):
            pairs = [pair for pair in self._held_out if pair[0] == split]
            with whole_file(self.draft.folder / f"{split}.jsonl") as file:
                lines = (json.dumps(pair[1:], ensure_ascii=False) + "\n" for pair in pairs)
                file.write_text("".join(lines), encoding="utf-8")
            if split == "dev":
                self._name_without_dev(self.text.lacking.keys() - {pair[1] for pair in pairs})

    def _name_without_dev(self, languages: Iterable[str]) -> None:
        for language in sorted(languages):
            found = f"language '{language}' {KINDS['no_dev']}: trained on, not evaluated: raise data.held_out"
            self._defects.add(Defect("no_dev", language, self.text.root or "data.train", 0, found))
        self._defects.refuse(self.strict)
