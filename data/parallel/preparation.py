"""Makes a store of a folder of parallel text, with several processes; continues where a killed preparation stopped.

Lines are counted and sampled; vocabularies are trained; pieces of text become ids, divided among shards; the shards are
shuffled. All of this happens in a folder of the cache that becomes the store at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from ...errors import ConfigurationError
from ..cache import made_json, save_array, whole_file
from ..defects import KINDS, Defect, Defects, in_words
from ..prepared import WORK
from ..sampling import temperature_shares
from ..source import Report
from ..store import LanguageSummary, write_description
from ..vocabulary import train_vocabulary
from ..workers import RunAll, in_processes
from .folders import PairFiles
from .pieces import Draft, encode, merge, pair_digest, scan
from .text_files import Piece, read_pieces, readable


@dataclass
class Preparation:
    """Makes one store; each step leaves files from which the next run sees that it is done.

    Attributes:
        draft: names the files.
        pairs: of files to read.
        policy: what is done about each kind of defect.
        workers: number of processes.
    """

    draft: Draft
    pairs: Sequence[PairFiles]
    policy: Mapping[str, str]
    workers: int
    report: Report
    _defects: Defects = field(default_factory=Defects)

    def __post_init__(self) -> None:
        self.text = self.draft.text

    def run(self) -> None:
        """Does all steps that are not done yet.

        Raises:
            ConfigurationError: see `source.open_parallel_store`.
        """
        for name in ("scan", "held_out", "pieces", "shards"):
            (self.draft.folder / WORK / name).mkdir(parents=True, exist_ok=True)
        with in_processes(self.workers) as run_all:
            lines = self._scan(run_all)
            self._train_vocabularies(lines)
            self._write_held_out(lines)
            summaries, done, total = {}, 0, sum(lines.values())
            for pair in (pair for pair in self.pairs if pair.split == "train"):
                summaries[pair.language] = self._encode(run_all, pair, lines[pair.language], done, total)
                done += lines[pair.language]
        self._defects.write(self.draft.folder, total)
        text = {key: value for key, value in asdict(self.text).items() if key != "sizes"}
        write_description(self.draft.folder, summaries, self.text.sizes.block, {"parallel_text": text})
        self.report("parallel text: languages", len(summaries), len(summaries))

    def _scan(self, run_all: RunAll) -> dict[str, int]:
        """Returns the pairs of lines of each language's training text; misaligned text is dropped or refused."""
        lines, aligned = {}, []
        for done, (pair, counts) in enumerate(zip(self.pairs, run_all(scan, self._scan_jobs()), strict=True)):
            self.report("parallel text: counting lines", done, len(self.pairs))
            if len(set(counts)) > 1:
                longer = pair.files[counts.index(max(counts))]
                both = f"{pair.source} has {counts[0]:,} lines, but {counts[1]:,} in {pair.target}"
                found = f"{KINDS['misaligned']}: {both}"
                self._defects.add(Defect("misaligned", pair.language, str(longer), min(counts) + 1, found))
                continue
            aligned.append(pair)
            if pair.split == "train":
                lines[pair.language] = counts[0]
        self._defects.refuse(self.policy)
        if not lines:
            raise ConfigurationError(f"data.root={self.text.root}: no training text is left, all of it is misaligned")
        self.pairs = [pair for pair in aligned if pair.language in lines]
        for language in sorted(lines.keys() - {pair.language for pair in self.pairs if pair.split == "dev"}):
            found = f"language '{language}' {KINDS['no_dev']}: trained on, not evaluated"
            self._defects.add(Defect("no_dev", language, str(self.text.root), 0, found))
        self._defects.refuse(self.policy)
        return lines

    def _scan_jobs(self) -> Iterator[tuple[Draft, PairFiles, int]]:
        """Yields the jobs; a language's sample is twice its share of the vocabulary's pairs, judged by file size."""
        train = {pair.language: pair.source.stat().st_size + 1 for pair in self.pairs if pair.split == "train"}
        vocabularies = self.text.vocabularies
        shares = dict(zip(train, temperature_shares(list(train.values()), vocabularies.temperature), strict=True))
        for pair in self.pairs:
            wanted = int(2 * shares[pair.language] * vocabularies.pairs) + 1 if pair.split == "train" else 0
            yield self.draft, pair, min(wanted, vocabularies.pairs)

    def _train_vocabularies(self, lines: Mapping[str, int]) -> None:
        wanted = self.text.vocabularies
        if wanted.shared:
            sides = [("vocabulary", wanted.source, [0, 1])]
        else:
            sides = [("source_vocabulary", wanted.source, [0]), ("target_vocabulary", wanted.target, [1])]
        for (key, size, columns), model in zip(sides, self.draft.models, strict=False):
            if not model.exists():
                self.report(f"parallel text: {key.replace('_', ' ')}", 0, 0)
                sentences = [pair[column] for pair in self._vocabulary_pairs(lines) for column in columns]
                if not sentences:
                    raise ConfigurationError(
                        f"data.root={self.text.root}: no pair of lines has text on both sides; the first file is "
                        f"{self.pairs[0].source}"
                    )
                with whole_file(model) as draft:
                    draft.write_bytes(train_vocabulary(sentences, size, wanted.character_coverage, key, wanted.smaller))

    def _vocabulary_pairs(self, lines: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yields pairs drawn with temperature from the samples; pairs of small languages may repeat."""
        wanted = self.text.vocabularies
        shares = temperature_shares([max(1, count) for count in lines.values()], wanted.temperature)
        total = min(wanted.pairs, sum(lines.values()))
        trained = [pair for pair in self.pairs if pair.split == "train"]
        for pair, share in zip(trained, shares, strict=True):
            sample = json.loads(self.draft.scan(pair).read_text(encoding="utf-8"))["sample"]
            count = max(1, int(share * total)) if sample else 0
            yield from (
                sample[i * len(sample) // count if count < len(sample) else i % len(sample)] for i in range(count)
            )

    def _encode(self, run_all: RunAll, pair: PairFiles, lines: int, done: int, total: int) -> LanguageSummary:
        """Makes ids of a language's pieces, then shards of pieces; removes the pieces when all shards are there."""
        code, draft = pair.language, self.draft
        shards = max(1, -(-lines // self.text.sizes.shard))

        def encoded() -> dict[str, Any]:
            defects, pieces = Defects(), 0
            jobs = (
                (draft.piece(code, piece.number), partial(encode, draft, piece, shards))
                for piece in read_pieces(pair, self.text.piece)
            )
            for pieces, found in enumerate(run_all(made_json, jobs), start=1):
                self.report("parallel text: token ids", min(total, done + pieces * self.text.piece), total)
                defects.update(Defects.from_json(found), self.policy)
            merges = [
                (draft.result(code, shard), partial(merge, draft, code, shard, pieces)) for shard in range(shards)
            ]
            merged = LanguageSummary.of_shards(LanguageSummary(**of) for of in run_all(made_json, merges))
            return {"summary": asdict(merged), **defects.as_json()}

        content = made_json(draft.result(code), encoded)
        for left in draft.piece(code, 0).parent.glob(f"{code}-*"):
            left.unlink()
        defects, summary = Defects.from_json(content), LanguageSummary(**content["summary"])
        self._defects.update(defects, self.policy)
        if not summary.pairs:
            counts = in_words(defects.counts.get(code, {}), self.policy)
            raise ConfigurationError(f"{pair.named}: no pair of language '{code}' is left ({counts})")
        return summary

    def _write_held_out(self, languages: Iterable[str]) -> None:
        """Writes the texts, and their digests; unusable lines are dropped or refused as in the training text."""
        digests: dict[str, list[int]] = {language: [] for language in languages}
        for split in ("dev", "test"):
            with whole_file(self.draft.folder / f"{split}.jsonl") as file, file.open("w", encoding="utf-8") as out:
                for piece in self._held_out_pieces(split):
                    language = piece.files.language
                    usable, defects = readable(piece, self.text.max_length)
                    self._defects.update(defects, self.policy)
                    for place, source, target in usable:
                        content = [language, piece.first + place, source, target]
                        out.write(json.dumps(content, ensure_ascii=False) + "\n")
                        digests[language].append(pair_digest(source, target))
        for language, of_language in digests.items():
            save_array(self.draft.held_out(language), np.array(of_language, np.uint64))

    def _held_out_pieces(self, split: str) -> Iterator[Piece]:
        pairs = [pair for pair in self.pairs if pair.split == split]
        return chain.from_iterable(read_pieces(pair, self.text.piece) for pair in pairs)
