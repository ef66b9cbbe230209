"""A folder of parallel text becomes a store: once, by several processes, going on where a killed preparation was.

Lines are counted and sampled; vocabularies are trained; pieces of text become ids, dealt out to shards; the shards
are shuffled. All of it happens in `<store>.partial` in the cache, which becomes the store at the end.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import sentencepiece

from ...errors import ConfigurationError
from ..cldr.corpus import publish
from ..sampling import temperature_shares
from ..source import Report
from ..store import Sizes, Trained, add_widths, as_widths, write_description
from ..vocabulary import train_vocabulary
from ..workers import Workers
from .defects import EXAMPLES, Defect, Ledger
from .folders import PairFiles
from .pieces import EncodeJob, MergeJob, Scan, ScanJob, encode, merge, readable, scan, write_whole
from .text_files import read_pieces

log = logging.getLogger(__name__)

WORK = "work"  # in a store that is being made: what its making leaves behind


@dataclass(frozen=True)
class Vocabularies:
    """What vocabularies are trained.

    Attributes:
        source, target: pieces.
        shared: one vocabulary for both sides, of `source` pieces.
        character_coverage: see `train_vocabulary`.
        pairs: sentence pairs shown to SentencePiece.
        temperature: with which they are drawn.
    """

    source: int
    target: int
    shared: bool = False
    character_coverage: float = 0.999995
    pairs: int = 1_000_000
    temperature: float = 5.0


@dataclass(frozen=True)
class ParallelText:
    """All that decides the bytes of a store, besides the text.

    Attributes:
        root: the folder. languages: None for all that are found. target: the language translated into.
        max_length: tokens of a side, its mark included; longer pairs are dropped.
        seed: of the shuffling.
        piece: lines that one process takes at a time.
    """

    root: str | None
    languages: tuple[str, ...] | None
    target: str
    vocabularies: Vocabularies
    max_length: int
    seed: int
    piece: int = 50_000
    sizes: Sizes = field(default_factory=Sizes)


class Preparation:
    """One run of it; each step leaves files behind by which the next run knows that it is done.

    Args:
        pairs: the files. policy: what to do with each kind of defect.
        folder: where the store will be. workers: processes.
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
        self._text, self._pairs, self._folder, self._report = text, pairs, folder, report
        self._draft = folder.with_name(f"{folder.name}.partial")
        self._work = self._draft / WORK
        self._ledger = Ledger(policy)
        self._workers = workers

    def run(self) -> None:
        """Everything that is not done yet.

        Raises:
            ConfigurationError: see `open_parallel_store`.
        """
        for name in ("scan", "pieces", "merged"):
            (self._work / name).mkdir(parents=True, exist_ok=True)
        with Workers(self._workers) as workers:
            scans = self._scan(workers)
            self._train_vocabularies(scans)
            trained = self._encode(workers, scans)
        for split in ("dev", "test"):
            self._write_held_out(split)
        self._finish(trained)

    def _scan(self, workers: Workers) -> dict[str, Scan]:
        """Of each language, its training text; misaligned text is dropped or refused."""
        self._report("parallel text: counting lines", 0, len(self._pairs))
        scans = {}
        results = workers.map(scan, self._scan_jobs())
        for done, (pair, result) in enumerate(zip(self._pairs, results, strict=True)):
            self._report("parallel text: counting lines", done, len(self._pairs))
            if len(set(result.lines)) > 1:
                counts = f"{result.lines[0]:,} lines, but {result.lines[1]:,} in {pair.target}"
                longer = pair.files[result.lines.index(max(result.lines))]
                found = f"has no line beside it: {pair.source} has {counts}"
                first = Defect("misaligned", pair.language, str(longer), result.pairs + 1, found)
                self._ledger.add([first], {pair.language: {"misaligned": 1}})
                self._pairs = [other for other in self._pairs if other != pair]
            elif pair.split == "train":
                scans[pair.language] = result
        if not scans:
            raise ConfigurationError(f"data.root={self._text.root}: no training text is left, all of it is misaligned")
        self._pairs = [pair for pair in self._pairs if pair.language in scans]
        for language in scans:
            if not any((pair.language, pair.split) == (language, "dev") for pair in self._pairs):
                said = "has no dev set: trained on, not evaluated"
                self._ledger.add(
                    [Defect("no_dev", language, str(self._text.root), 0, f"language '{language}' {said}")],
                    {language: {"no_dev": 1}},
                )
        return scans

    def _scan_jobs(self) -> Iterator[ScanJob]:
        """A language's sample is about twice what it will give: its share is told by the size of its files."""
        train = {pair.language: pair.source.stat().st_size + 1 for pair in self._pairs if pair.split == "train"}
        vocabularies = self._text.vocabularies
        shares = dict(zip(train, temperature_shares(list(train.values()), vocabularies.temperature), strict=True))
        for pair in self._pairs:
            wanted = int(2 * shares[pair.language] * vocabularies.pairs) + 1 if pair.split == "train" else 0
            out = self._work / "scan" / f"{pair.language}-{pair.split}.jsonl"
            yield ScanJob(pair, min(wanted, vocabularies.pairs), self._text.piece, out)

    def _train_vocabularies(self, scans: Mapping[str, Scan]) -> None:
        wanted = self._text.vocabularies
        sides = ("source",) if wanted.shared else ("source", "target")
        for side in sides:
            model = self._draft / f"{side}.model"
            if model.exists():
                continue
            self._report(f"parallel text: {side} vocabulary", 0, 0)
            of_side = (0, 1) if wanted.shared else (sides.index(side),)
            sentences = [pair[i] for pair in self._vocabulary_pairs(scans) for i in of_side]
            size = wanted.source if side == "source" else wanted.target
            key = "vocabulary" if wanted.shared else f"{side}_vocabulary"
            model.write_bytes(self._known_vocabulary(sentences, size, key))

    def _vocabulary_pairs(self, scans: Mapping[str, Scan]) -> Iterator[list[str]]:
        """Pairs drawn with temperature from the samples; small languages come round more often."""
        wanted = self._text.vocabularies
        counts = [result.pairs for result in scans.values()]
        shares = temperature_shares([max(1, count) for count in counts], wanted.temperature)
        total = min(wanted.pairs, sum(counts))
        for language, share in zip(scans, shares, strict=True):
            with (self._work / "scan" / f"{language}-train.jsonl").open(encoding="utf-8") as lines:
                sample = [json.loads(line) for line in lines]
            count = max(1, int(share * total)) if sample else 0
            yield from (
                sample[i * len(sample) // count if count < len(sample) else i % len(sample)] for i in range(count)
            )

    def _known_vocabulary(self, sentences: Sequence[str], size: int, key: str) -> bytes:
        """Trained, or found in the cache: the same sentences and size need no second training."""
        coverage = self._text.vocabularies.character_coverage
        digest = hashlib.blake2b(json.dumps([size, coverage, sentencepiece.__version__]).encode(), digest_size=8)
        for sentence in sentences:
            digest.update(sentence.encode() + b"\n")
        kept = self._folder.parent / "vocabularies" / f"{digest.hexdigest()}.model"
        if not kept.exists():
            model = train_vocabulary(sentences, size, coverage, key)
            kept.parent.mkdir(exist_ok=True)
            draft = kept.with_name(f".{kept.name}-{self._folder.name}")
            draft.write_bytes(model)
            draft.replace(kept)
        return kept.read_bytes()

    def _encode(self, workers: Workers, scans: Mapping[str, Scan]) -> dict[str, Trained]:
        trained, total, done = {}, sum(result.pairs for result in scans.values()), 0
        for pair in self._pairs:
            if pair.split != "train":
                continue
            trained[pair.language] = self._encode_language(workers, pair, scans[pair.language].pairs, done, total)
            done += scans[pair.language].pairs
        return trained

    def _encode_language(self, workers: Workers, pair: PairFiles, lines: int, done: int, total: int) -> Trained:
        """Pieces to ids, then shards from pieces, whose files are removed when all shards are there."""
        code, said = pair.language, self._work / "merged" / f"{pair.language}.json"
        shards = max(1, -(-lines // self._text.sizes.shard))
        if not said.exists():
            counts: Counter[str] = Counter()
            defects: list[Defect] = []
            pieces: list[Path] = []
            for encoded in workers.map(encode, self._encode_jobs(pair, shards)):
                pieces.append(self._piece(code, len(pieces)))
                self._report("parallel text: token ids", min(total, done + len(pieces) * self._text.piece), total)
                counts.update(encoded.counts)
                for defect in (Defect(**told) for told in encoded.defects):
                    self._ledger.check(defect)
                    if sum(other.kind == defect.kind for other in defects) < EXAMPLES:
                        defects.append(defect)
            jobs = [MergeJob(code, n, pieces, self._text.seed, self._draft, self._text.sizes) for n in range(shards)]
            merged = list(workers.map(merge, jobs))
            trained = Trained([m.pairs for m in merged], add_widths([as_widths(m.widths) for m in merged]))
            named = [vars(defect) for defect in defects]
            write_whole(said, json.dumps({"trained": asdict(trained), "counts": counts, "defects": named}))
        summary = json.loads(said.read_text(encoding="utf-8"))
        for left in (self._work / "pieces").glob(f"{code}-*"):
            left.unlink()
        self._ledger.add([Defect(**defect) for defect in summary["defects"]], {code: summary["counts"]})
        trained = Trained(summary["trained"]["shards"], as_widths(summary["trained"]["widths"]))
        if not trained.pairs:
            raise ConfigurationError(f"{pair.named}: no pair of language '{code}' is left ({self._ledger.summary()})")
        return trained

    def _piece(self, code: str, number: int) -> Path:
        """A piece's files, less their endings."""
        return self._work / "pieces" / f"{code}-{number:06}"

    def _encode_jobs(self, pair: PairFiles, shards: int) -> Iterator[EncodeJob]:
        source = self._draft / "source.model"
        target = source if self._text.vocabularies.shared else self._draft / "target.model"
        for piece in read_pieces(pair, self._text.piece):
            out = self._piece(pair.language, piece.number)
            yield EncodeJob(pair, piece, source, target, self._text.max_length, shards, self._text.seed, out)

    def _write_held_out(self, split: str) -> None:
        """The texts; a line that cannot be used is dropped or refused like one of the training text."""
        draft = self._draft / f".{split}.jsonl"
        with draft.open("w", encoding="utf-8") as lines:
            for pair in self._pairs:
                if pair.split != split:
                    continue
                for piece in read_pieces(pair, self._text.piece):
                    usable, defects, counts = readable(pair, piece, self._text.max_length)
                    self._ledger.add(defects, {pair.language: counts})
                    for place, source, target in usable:
                        said = [pair.language, piece.first + place, source, target]
                        lines.write(json.dumps(said, ensure_ascii=False) + "\n")
        draft.replace(self._draft / f"{split}.jsonl")

    def _finish(self, trained: dict[str, Trained]) -> None:
        said = json.dumps(self._ledger.as_json(), indent=1, ensure_ascii=False)
        (self._draft / "defects.json").write_text(said, encoding="utf-8")
        text = {key: value for key, value in asdict(self._text).items() if key != "sizes"}
        write_description(self._draft, trained, self._text.sizes.block, {"parallel_text": text})
        publish(self._draft, self._folder)
        pairs = sum(of.pairs for of in trained.values())
        dropped = self._ledger.summary()
        if dropped:
            log.warning("parallel text: %s; which ones: %s", dropped, self._folder / "defects.json")
        self._report(f"parallel text: pairs of {len(trained)} languages", pairs, pairs)
