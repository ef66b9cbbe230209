"""Makes a store of a folder of parallel text, with several processes; continues where a killed preparation stopped.

Lines are counted and sampled; vocabularies are trained; pieces of text become ids, divided among shards; the shards are
shuffled. All of this happens in a folder of the cache that becomes the store at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigurationError
from ..cache import made_json, save_array, whole_file
from ..defects import KINDS, Defect, Defects, in_words
from ..prepared import WORK
from ..sampling import temperature_shares
from ..source import Report
from ..store import LanguageSummary, Numbers, write_description
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
    _corpora: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    _done: int = 0  # lines of the languages that are finished

    def __post_init__(self) -> None:
        self.text = self.draft.text

    def run(self) -> None:
        """Does all steps that are not done yet.

        Raises:
            ConfigurationError: see `source.open_parallel_store`.
        """
        for name in ("scan", "held_out", "ids", "shards"):
            (self.draft.folder / WORK / name).mkdir(parents=True, exist_ok=True)
        with in_processes(self.workers) as run_all:
            lines = self._scan(run_all)
            self._train_vocabularies(lines)
            self._write_held_out(_by_language(lines))
            summaries, total = {}, sum(lines.values())
            for language, of_language in _by_language(lines).items():
                summaries[language] = self._encode(run_all, language, of_language, total)
        self._defects.write(self.draft.folder, total, self._corpora)
        text = {key: value for key, value in asdict(self.text).items() if key != "sizes"}
        write_description(self.draft.folder, summaries, self.text.sizes.block, {"parallel_text": text})
        self.report("parallel text: languages", len(summaries), len(summaries))

    def _scan(self, run_all: RunAll) -> dict[PairFiles, int]:
        """Returns the pairs of lines of each corpus to train on; misaligned text is dropped or refused."""
        lines, aligned = {}, []
        self.report("parallel text: counting lines", 0, len(self.pairs))
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
                lines[pair] = counts[0]
        self._defects.refuse(self.policy)
        if not lines:
            raise ConfigurationError(f"{self.text.named}: no training text is left, all of it is misaligned")
        trained = _by_language(lines)
        self.pairs = [pair for pair in aligned if pair.language in trained]
        for language in sorted(trained.keys() - {pair.language for pair in self.pairs if pair.split == "dev"}):
            found = f"language '{language}' {KINDS['no_dev']}: trained on, not evaluated"
            self._defects.add(Defect("no_dev", language, self.text.root or "data.train", 0, found))
        self._defects.refuse(self.policy)
        return lines

    def _scan_jobs(self) -> Iterator[tuple[Draft, PairFiles, int]]:
        """Yields the jobs; a corpus' sample is twice its share of the vocabulary's pairs, judged by file size."""
        most = self.text.vocabularies.pairs
        shares = self._shares({pair: pair.source.stat().st_size + 1 for pair in self.pairs if pair.split == "train"})
        for pair in self.pairs:
            wanted = int(2 * shares[pair] * most) + 1 if pair in shares else 0
            yield self.draft, pair, min(wanted, most)

    def _shares(self, sizes: Mapping[PairFiles, int]) -> dict[PairFiles, float]:
        """Returns each corpus' share of the vocabularies' pairs: its part of the share of its language."""
        totals = {code: max(1, sum(of.values())) for code, of in _by_language(sizes).items()}
        drawn = temperature_shares(list(totals.values()), self.text.vocabularies.temperature)
        shares = dict(zip(totals, drawn, strict=True))
        return {pair: shares[pair.language] * (size / totals[pair.language]) for pair, size in sizes.items()}

    def _train_vocabularies(self, lines: Mapping[PairFiles, int]) -> None:
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
                    _, found = readable(next(read_pieces(self.pairs[0], self.text.piece)), self.text.max_length)
                    first = found.examples[0] if found.examples else f"the first file is {self.pairs[0].source}"
                    raise ConfigurationError(f"{self.text.named}: no pair of lines has text on both sides; {first}")
                with whole_file(model) as draft:
                    draft.write_bytes(train_vocabulary(sentences, size, wanted.character_coverage, key, wanted.smaller))

    def _vocabulary_pairs(self, lines: Mapping[PairFiles, int]) -> Iterator[tuple[str, str]]:
        """Yields pairs drawn with temperature from the samples; pairs of small languages may repeat."""
        total = min(self.text.vocabularies.pairs, sum(lines.values()))
        for pair, share in self._shares(lines).items():
            sample = json.loads(self.draft.scan(pair).read_text(encoding="utf-8"))["sample"]
            count = max(1, int(share * total)) if sample else 0
            yield from (
                sample[i * len(sample) // count if count < len(sample) else i % len(sample)] for i in range(count)
            )

    def _encode(self, run_all: RunAll, code: str, lines: Mapping[PairFiles, int], total: int) -> LanguageSummary:
        """Makes ids of a language's pieces, then shards of pieces; removes the pieces when all shards are there."""
        draft, of_language = self.draft, sum(lines.values())
        shards = max(1, -(-of_language // self.text.sizes.shard))

        def encoded() -> dict[str, Any]:
            defects, done, read, bounds = Defects(), self._done, list[tuple[str, int]](), list[Any]()
            corpora = {str(pair.source): [0, number] for pair, number in lines.items()}
            self.report("parallel text: token ids", done, total)

            def jobs() -> Iterator[tuple[Path, Callable[[], dict[str, Any]]]]:
                numbers = count()
                for piece in chain.from_iterable(read_pieces(pair, self.text.piece, numbers) for pair in lines):
                    read.append((str(piece.files.source), len(piece.rows)))
                    made = draft.piece(code, piece.number)
                    sent = piece._replace(rows=[]) if made.exists() else piece
                    yield made, partial(encode, draft, sent, shards)

            for found in run_all(made_json, jobs()):
                file, rows = read[len(bounds)]
                done += rows
                self.report("parallel text: token ids", done, total)
                defects.update(Defects.from_json(found), self.policy)
                bounds.append(np.array(found["bounds"]))
                corpora[file][0] += int(bounds[-1][0, -1])
            merged = self._merge(run_all, code, np.stack(bounds))
            return {"summary": asdict(merged), "corpora": corpora, **defects.as_json()}

        content = made_json(draft.result(code), encoded)
        for left in draft.piece(code, 0).parent.glob(f"{code}-??????.*"):
            left.unlink()
        defects, summary = Defects.from_json(content), LanguageSummary(**content["summary"])
        self._defects.update(defects, self.policy)
        self._done += of_language
        if len(lines) > 1:
            self._corpora[code] = content["corpora"]
        if not summary.pairs:
            counts = in_words(defects.counts.get(code, {}), self.policy)
            files = " and ".join(str(file) for pair in lines for file in pair.files)
            raise ConfigurationError(f"{files}: no pair of language '{code}' is left ({counts})")
        return summary

    def _merge(self, run_all: RunAll, code: str, bounds: Numbers) -> LanguageSummary:
        """Makes the shards of a language of its pieces. `bounds`: of the shards in each piece, see `encode`."""
        summaries = list[LanguageSummary]()
        jobs = (
            (self.draft.result(code, n), partial(merge, self.draft, code, n, bounds[:, :, n : n + 2]))
            for n in range(bounds.shape[2] - 1)
        )
        self.report("parallel text: shards", 0, 0)
        for of_shard in run_all(made_json, jobs):
            summaries.append(LanguageSummary(**of_shard))
            self.report("parallel text: shards", len(summaries), 0)
        return LanguageSummary.of_shards(summaries)

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


def _by_language(counts: Mapping[PairFiles, int]) -> dict[str, dict[PairFiles, int]]:
    """Returns the counts of each language's corpora, languages in their order."""
    of_language: dict[str, dict[PairFiles, int]] = {}
    for pair, number in counts.items():
        of_language.setdefault(pair.language, {})[pair] = number
    return of_language
