"""Makes a store of a folder of parallel text, with several processes; continues where a killed preparation stopped.

Lines are counted and sampled; vocabularies are trained; pieces of text become ids, divided among shards; the shards are
shuffled. All of this happens in a folder of the cache that becomes the store at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigurationError
from ..cache import made_json, whole_file
from ..defects import KINDS, Defect, Defects, in_words
from ..prepared import WORK
from ..sampling import temperature_shares
from ..source import Report
from ..store import LanguageSummary, Sizes, write_description
from ..vocabulary import cached_vocabulary
from ..workers import Workers
from .folders import PairFiles
from .pieces import EncodeJob, MergeJob, Scan, ScanJob, encode, merge, pair_digest, scan
from .text_files import Piece, read_pieces, readable


@dataclass(frozen=True)
class Vocabularies:
    """Describes the vocabularies to train.

    Attributes:
        source, target: pieces.
        shared: one vocabulary for both sides, of `source` pieces.
        character_coverage: see `train_vocabulary`.
        pairs: sentence pairs given to SentencePiece.
        temperature: of the sampling of these pairs.
        smaller: a text that supports fewer pieces gets so many.
    """

    source: int
    target: int
    shared: bool = False
    character_coverage: float = 0.999995
    pairs: int = 1_000_000
    temperature: float = 5.0
    smaller: bool = False


@dataclass(frozen=True)
class ParallelText:
    """Holds all that decides the bytes of a store, besides the text.

    Attributes:
        root: the folder. languages: None: all that are found. target: the language of the translations.
        max_length: tokens of a side with its end token; longer pairs are dropped.
        seed: of the shuffling.
        kept: kinds of `defects.KEEPABLE` that are trained on.
        piece: lines that one process takes at a time.
    """

    root: str | None
    languages: tuple[str, ...] | None
    target: str
    vocabularies: Vocabularies
    max_length: int
    seed: int
    kept: tuple[str, ...] = ("copied",)
    piece: int = 50_000
    sizes: Sizes = field(default_factory=Sizes)


class Preparation:
    """Makes one store; each step leaves files from which the next run sees that it is done.

    Args:
        pairs: the files.
        policy: what is done about each kind of defect.
        draft: the folder that becomes the store.
        workers: number of processes.
    """

    def __init__(
        self,
        text: ParallelText,
        pairs: Sequence[PairFiles],
        policy: Mapping[str, str],
        draft: Path,
        workers: int,
        report: Report,
    ) -> None:
        self._text, self._pairs, self._draft, self._report = text, pairs, draft, report
        self._work = self._draft / WORK
        self._policy, self._defects, self._workers = policy, Defects(), workers

    def run(self) -> None:
        """Does all steps that are not done yet.

        Raises:
            ConfigurationError: see `source.open_parallel_store`.
        """
        for name in ("scan", "held_out", "pieces", "shards"):
            (self._work / name).mkdir(parents=True, exist_ok=True)
        with Workers(self._workers) as workers:
            scans = self._scan(workers)
            self._train_vocabularies(scans)
            self._write_held_out(scans)
            summaries = self._encode(workers, scans)
        self._finish(summaries, sum(result.pairs for result in scans.values()))

    def _scan(self, workers: Workers) -> dict[str, Scan]:
        """Returns the scan of each language's training text; misaligned text is dropped or refused."""
        self._report("parallel text: counting lines", 0, len(self._pairs))
        scans, aligned = {}, []
        results = workers.map(scan, self._scan_jobs())
        for done, (pair, result) in enumerate(zip(self._pairs, results, strict=True)):
            self._report("parallel text: counting lines", done, len(self._pairs))
            if len(set(result.lines)) > 1:
                counts = f"{result.lines[0]:,} lines, but {result.lines[1]:,} in {pair.target}"
                longer = pair.files[result.lines.index(max(result.lines))]
                found = f"{KINDS['misaligned']}: {pair.source} has {counts}"
                self._enter(Defect("misaligned", pair.language, str(longer), result.pairs + 1, found))
                continue
            aligned.append(pair)
            if pair.split == "train":
                scans[pair.language] = result
        if not scans:
            raise ConfigurationError(f"data.root={self._text.root}: no training text is left, all of it is misaligned")
        self._pairs = [pair for pair in aligned if pair.language in scans]
        evaluated = {pair.language for pair in self._pairs if pair.split == "dev"}
        for language in (language for language in scans if language not in evaluated):
            found = f"language '{language}' has no dev set: trained on, not evaluated"
            self._enter(Defect("no_dev", language, str(self._text.root), 0, found))
        return scans

    def _enter(self, defect: Defect) -> None:
        self._defects.add(defect)
        self._defects.refuse(self._policy)

    def _scan_jobs(self) -> Iterator[ScanJob]:
        """Yields the jobs; a language's sample is twice its share of the vocabulary's pairs, judged by file size."""
        train = {pair.language: pair.source.stat().st_size + 1 for pair in self._pairs if pair.split == "train"}
        vocabularies = self._text.vocabularies
        shares = dict(zip(train, temperature_shares(list(train.values()), vocabularies.temperature), strict=True))
        for pair in self._pairs:
            wanted = int(2 * shares[pair.language] * vocabularies.pairs) + 1 if pair.split == "train" else 0
            out = self._scan_file(pair.language, pair.split)
            yield ScanJob(pair, min(wanted, vocabularies.pairs), self._text.piece, out)

    def _scan_file(self, language: str, split: str) -> Path:
        return self._work / "scan" / f"{language}-{split}.json"

    def _train_vocabularies(self, scans: Mapping[str, Scan]) -> None:
        wanted = self._text.vocabularies
        sides = [("source", wanted.source, [0, 1] if wanted.shared else [0])]
        if not wanted.shared:
            sides.append(("target", wanted.target, [1]))
        for side, size, columns in sides:
            key = "vocabulary" if wanted.shared else f"{side}_vocabulary"
            model = self._draft / f"{side}.model"
            if not model.exists():
                self._report(f"parallel text: {side} vocabulary", 0, 0)
                sentences = [pair[column] for pair in self._vocabulary_pairs(scans) for column in columns]
                if not sentences:
                    raise ConfigurationError(
                        f"data.root={self._text.root}: no pair of lines has text on both sides; the first file is "
                        f"{self._pairs[0].source}"
                    )
                coverage, cache = wanted.character_coverage, self._draft.parent
                model.write_bytes(cached_vocabulary(cache, sentences, size, coverage, key, wanted.smaller))

    def _vocabulary_pairs(self, scans: Mapping[str, Scan]) -> Iterator[tuple[str, str]]:
        """Yields pairs drawn with temperature from the samples; pairs of small languages may repeat."""
        wanted = self._text.vocabularies
        counts = [result.pairs for result in scans.values()]
        shares = temperature_shares([max(1, count) for count in counts], wanted.temperature)
        total = min(wanted.pairs, sum(counts))
        for language, share in zip(scans, shares, strict=True):
            sample = json.loads(self._scan_file(language, "train").read_text(encoding="utf-8"))["sample"]
            count = max(1, int(share * total)) if sample else 0
            yield from (
                sample[i * len(sample) // count if count < len(sample) else i % len(sample)] for i in range(count)
            )

    def _encode(self, workers: Workers, scans: Mapping[str, Scan]) -> dict[str, LanguageSummary]:
        summaries, total, done = {}, sum(result.pairs for result in scans.values()), 0
        for pair in self._pairs:
            if pair.split == "train":
                lines = scans[pair.language].pairs
                summaries[pair.language] = self._encode_language(workers, pair, lines, done, total)
                done += lines
        return summaries

    def _encode_language(self, workers: Workers, pair: PairFiles, lines: int, done: int, total: int) -> LanguageSummary:
        """Makes ids of pieces, then shards of pieces; removes the pieces' files when all shards are there."""
        code = pair.language

        def encoded() -> dict[str, Any]:
            defects, pieces = Defects(), list[Path]()
            shards = max(1, -(-lines // self._text.sizes.shard))
            for found in workers.map(encode, self._encode_jobs(pair, shards)):
                pieces.append(self._piece(code, len(pieces)))
                self._report("parallel text: token ids", min(total, done + len(pieces) * self._text.piece), total)
                found.refuse(self._policy)
                defects.update(found)
            summary = LanguageSummary.of_shards(workers.map(merge, self._merge_jobs(code, pieces, shards)))
            return {"summary": asdict(summary), **defects.as_json()}

        content = made_json(self._work / "shards" / f"{code}.json", encoded)
        for left in (self._work / "pieces").glob(f"{code}-*"):
            left.unlink()
        defects, summary = Defects.from_json(content), LanguageSummary.from_json(content["summary"])
        defects.refuse(self._policy)
        self._defects.update(defects)
        if not summary.pairs:
            counts = in_words(defects.counts.get(code, {}), self._policy)
            raise ConfigurationError(f"{pair.named}: no pair of language '{code}' is left ({counts})")
        return summary

    def _piece(self, code: str, number: int) -> Path:
        """Returns the path of a piece's files, without their endings."""
        return self._work / "pieces" / f"{code}-{number:06}"

    def _encode_jobs(self, pair: PairFiles, shards: int) -> Iterator[EncodeJob]:
        source = self._draft / "source.model"
        target = source if self._text.vocabularies.shared else self._draft / "target.model"
        for piece in read_pieces(pair, self._text.piece):
            out = self._piece(pair.language, piece.number)
            models, held_out = (source, target), self._digests(pair.language)
            text = self._text
            yield EncodeJob(piece, models, text.max_length, shards, text.seed, held_out, text.kept, out)

    def _merge_jobs(self, code: str, pieces: list[Path], shards: int) -> Iterator[MergeJob]:
        for number in range(shards):
            result = self._work / "shards" / f"{code}-{number:05}.json"
            yield MergeJob(code, number, pieces, self._text.seed, self._draft, self._text.sizes, result)

    def _digests(self, language: str) -> Path:
        """Returns the path of the digests of a language's held-out pairs."""
        return self._work / "held_out" / f"{language}.npy"

    def _write_held_out(self, languages: Iterable[str]) -> None:
        """Writes the texts, and their digests; unusable lines are dropped or refused as in the training text."""
        digests: dict[str, list[int]] = {language: [] for language in languages}
        for split in ("dev", "test"):
            with whole_file(self._draft / f"{split}.jsonl") as draft, draft.open("w", encoding="utf-8") as lines:
                for piece in self._held_out_pieces(split):
                    language = piece.files.language
                    usable, defects = readable(piece, self._text.max_length)
                    self._defects.update(defects)
                    self._defects.refuse(self._policy)
                    for place, source, target in usable:
                        content = [language, piece.first + place, source, target]
                        lines.write(json.dumps(content, ensure_ascii=False) + "\n")
                        digests[language].append(pair_digest(source, target))
        for language, of_language in digests.items():
            with whole_file(self._digests(language)) as draft:
                np.save(draft, np.array(of_language, np.uint64))

    def _held_out_pieces(self, split: str) -> Iterator[Piece]:
        pairs = [pair for pair in self._pairs if pair.split == split]
        return chain.from_iterable(read_pieces(pair, self._text.piece) for pair in pairs)

    def _finish(self, summaries: dict[str, LanguageSummary], lines: int) -> None:
        self._defects.write(self._draft, lines)
        text = {key: value for key, value in asdict(self._text).items() if key != "sizes"}
        write_description(self._draft, summaries, self._text.sizes.block, {"parallel_text": text})
        self._report("parallel text: languages", len(summaries), len(summaries))
