"""Makes a store of a folder of parallel text, with several processes; continues where a killed preparation stopped.

Lines are counted and sampled; vocabularies are trained; pieces of text become ids, divided among shards; the shards are
shuffled. All of this happens in a folder of the cache that becomes the store at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
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
from ..workers import Workers
from .folders import PairFiles
from .pieces import Draft, ParallelText, encode, merge, pair_digest, scan
from .text_files import Piece, read_pieces, readable


class Preparation:
    """Makes one store; each step leaves files from which the next run sees that it is done.

    Args:
        pairs: the files.
        policy: what is done about each kind of defect.
        folder: that becomes the store.
        workers: number of processes.
    """

    def __init__(
        self,
        text: ParallelText,
        pairs: Sequence[PairFiles],
        policy: Mapping[str, str],
        folder: Path,
        workers: int,
        report: Report,
    ) -> None:
        self._text, self._pairs, self._draft, self._report = text, pairs, Draft(text, folder), report
        self._policy, self._defects, self._workers = policy, Defects(), workers

    def run(self) -> None:
        """Does all steps that are not done yet.

        Raises:
            ConfigurationError: see `source.open_parallel_store`.
        """
        for name in ("scan", "held_out", "pieces", "shards"):
            (self._draft.folder / WORK / name).mkdir(parents=True, exist_ok=True)
        with Workers(self._workers) as workers:
            lines = self._scan(workers)
            self._train_vocabularies(lines)
            self._write_held_out(lines)
            summaries, done, total = {}, 0, sum(lines.values())
            for pair in (pair for pair in self._pairs if pair.split == "train"):
                summaries[pair.language] = self._encode(workers, pair, lines[pair.language], done, total)
                done += lines[pair.language]
        self._defects.write(self._draft.folder, total)
        text = {key: value for key, value in asdict(self._text).items() if key != "sizes"}
        write_description(self._draft.folder, summaries, self._text.sizes.block, {"parallel_text": text})
        self._report("parallel text: languages", len(summaries), len(summaries))

    def _scan(self, workers: Workers) -> dict[str, int]:
        """Returns the pairs of lines of each language's training text; misaligned text is dropped or refused."""
        lines, aligned = {}, []
        for done, (pair, counts) in enumerate(zip(self._pairs, workers.map(scan, self._scan_jobs()), strict=True)):
            self._report("parallel text: counting lines", done, len(self._pairs))
            if len(set(counts)) > 1:
                longer = pair.files[counts.index(max(counts))]
                both = f"{pair.source} has {counts[0]:,} lines, but {counts[1]:,} in {pair.target}"
                found = f"{KINDS['misaligned']}: {both}"
                self._enter(Defect("misaligned", pair.language, str(longer), min(counts) + 1, found))
                continue
            aligned.append(pair)
            if pair.split == "train":
                lines[pair.language] = counts[0]
        if not lines:
            raise ConfigurationError(f"data.root={self._text.root}: no training text is left, all of it is misaligned")
        self._pairs = [pair for pair in aligned if pair.language in lines]
        for language in sorted(lines.keys() - {pair.language for pair in self._pairs if pair.split == "dev"}):
            found = f"language '{language}' {KINDS['no_dev']}: trained on, not evaluated"
            self._enter(Defect("no_dev", language, str(self._text.root), 0, found))
        return lines

    def _enter(self, defect: Defect) -> None:
        self._defects.add(defect)
        self._defects.refuse(self._policy)

    def _scan_jobs(self) -> Iterator[tuple[Draft, PairFiles, int]]:
        """Yields the jobs; a language's sample is twice its share of the vocabulary's pairs, judged by file size."""
        train = {pair.language: pair.source.stat().st_size + 1 for pair in self._pairs if pair.split == "train"}
        vocabularies = self._text.vocabularies
        shares = dict(zip(train, temperature_shares(list(train.values()), vocabularies.temperature), strict=True))
        for pair in self._pairs:
            wanted = int(2 * shares[pair.language] * vocabularies.pairs) + 1 if pair.split == "train" else 0
            yield self._draft, pair, min(wanted, vocabularies.pairs)

    def _train_vocabularies(self, lines: Mapping[str, int]) -> None:
        wanted = self._text.vocabularies
        sides = [("source", wanted.source, [0, 1] if wanted.shared else [0])]
        if not wanted.shared:
            sides.append(("target", wanted.target, [1]))
        for side, size, columns in sides:
            key = "vocabulary" if wanted.shared else f"{side}_vocabulary"
            model = self._draft.folder / f"{side}.model"
            if not model.exists():
                self._report(f"parallel text: {side} vocabulary", 0, 0)
                sentences = [pair[column] for pair in self._vocabulary_pairs(lines) for column in columns]
                if not sentences:
                    raise ConfigurationError(
                        f"data.root={self._text.root}: no pair of lines has text on both sides; the first file is "
                        f"{self._pairs[0].source}"
                    )
                with whole_file(model) as draft:
                    draft.write_bytes(train_vocabulary(sentences, size, wanted.character_coverage, key, wanted.smaller))

    def _vocabulary_pairs(self, lines: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yields pairs drawn with temperature from the samples; pairs of small languages may repeat."""
        wanted = self._text.vocabularies
        shares = temperature_shares([max(1, count) for count in lines.values()], wanted.temperature)
        total = min(wanted.pairs, sum(lines.values()))
        trained = [pair for pair in self._pairs if pair.split == "train"]
        for pair, share in zip(trained, shares, strict=True):
            sample = json.loads(self._draft.scan(pair).read_text(encoding="utf-8"))["sample"]
            count = max(1, int(share * total)) if sample else 0
            yield from (
                sample[i * len(sample) // count if count < len(sample) else i % len(sample)] for i in range(count)
            )

    def _encode(self, workers: Workers, pair: PairFiles, lines: int, done: int, total: int) -> LanguageSummary:
        """Makes ids of a language's pieces, then shards of pieces; removes the pieces when all shards are there."""
        code, draft = pair.language, self._draft
        shards = max(1, -(-lines // self._text.sizes.shard))

        def encoded() -> dict[str, Any]:
            defects, pieces = Defects(), 0
            jobs = ((draft, piece, shards) for piece in read_pieces(pair, self._text.piece))
            for pieces, found in enumerate(workers.map(encode, jobs), start=1):
                self._report("parallel text: token ids", min(total, done + pieces * self._text.piece), total)
                found.refuse(self._policy)
                defects.update(found)
            merged = workers.map(merge, [(draft, code, shard, pieces) for shard in range(shards)])
            return {"summary": asdict(LanguageSummary.of_shards(merged)), **defects.as_json()}

        content = made_json(draft.result(code), encoded)
        for left in draft.piece(code, 0).parent.glob(f"{code}-*"):
            left.unlink()
        defects, summary = Defects.from_json(content), LanguageSummary.from_json(content["summary"])
        defects.refuse(self._policy)
        self._defects.update(defects)
        if not summary.pairs:
            counts = in_words(defects.counts.get(code, {}), self._policy)
            raise ConfigurationError(f"{pair.named}: no pair of language '{code}' is left ({counts})")
        return summary

    def _write_held_out(self, languages: Iterable[str]) -> None:
        """Writes the texts, and their digests; unusable lines are dropped or refused as in the training text."""
        digests: dict[str, list[int]] = {language: [] for language in languages}
        for split in ("dev", "test"):
            with whole_file(self._draft.folder / f"{split}.jsonl") as file, file.open("w", encoding="utf-8") as out:
                for piece in self._held_out_pieces(split):
                    language = piece.files.language
                    usable, defects = readable(piece, self._text.max_length)
                    self._defects.update(defects)
                    self._defects.refuse(self._policy)
                    for place, source, target in usable:
                        content = [language, piece.first + place, source, target]
                        out.write(json.dumps(content, ensure_ascii=False) + "\n")
                        digests[language].append(pair_digest(source, target))
        for language, of_language in digests.items():
            save_array(self._draft.held_out(language), np.array(of_language, np.uint64))

    def _held_out_pieces(self, split: str) -> Iterator[Piece]:
        pairs = [pair for pair in self._pairs if pair.split == split]
        return chain.from_iterable(read_pieces(pair, self._text.piece) for pair in pairs)
