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

from ...disk import whole_file
from ...errors import ConfigurationError, in_utf8
from ...json_files import WORK as JSON_OF_WORK
from ...json_files import read_json
from ..cache import made_json, save_array
from ..defects import KINDS, Counted, Defect, Defects
from ..prepared import WORK, RunAll, in_processes
from ..sampling import temperature_shares
from ..source import Report
from ..store import LanguageSummary, Numbers, write_description
from ..vocabulary import train_vocabulary
from .folders import PairFiles
from .pieces import Draft, EncodedPiece, HeldOut, Scanned, encode, merge, pair_digest, read_pieces, readable, scan

Corpora = dict[str, dict[PairFiles, int]]
"""By language: a number for each corpus that is trained on."""


class EncodedLanguage(Counted):
    """Describes a language: its training pairs, those used and the lines of each corpus, what is held out."""

    summary: LanguageSummary
    corpora: dict[str, list[int]]
    held_out: list[HeldOut]


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
    _held_out: list[HeldOut] = field(default_factory=list)
    _done: int = 0  # lines of the languages that are finished

    def __post_init__(self) -> None:
        self.text = self.draft.text

    def run(self) -> None:
        """Does all steps that are not done yet.

        Raises:
            ConfigurationError: a defect is to be refused, or a vocabulary size does not fit the text.
        """
        (self.draft.folder / WORK).mkdir(exist_ok=True)
        with in_processes(self.workers) as run_all:
            lines = self._scan(run_all)
            self._train_vocabularies(lines)
            self._read_held_out(lines)
            total = sum(sum(of.values()) for of in lines.values())
            summaries = {code: self._encode(run_all, code, of, total) for code, of in lines.items()}
        self._write_held_out()
        self._defects.write(self.draft.folder, total, self._corpora)
        text = {key: value for key, value in asdict(self.text).items() if key != "sizes"}
        write_description(self.draft.folder, summaries, self.text.sizes.block, {"parallel_text": text})
        self.report("parallel text: languages", len(summaries), len(summaries))

    def _scan(self, run_all: RunAll) -> Corpora:
        """Returns the pairs of lines of each corpus to train on; misaligned text is dropped or refused."""
        lines: Corpora = {}
        aligned = []
        self.report("parallel text: counting lines", 0, len(self.pairs))
        for done, (pair, counts) in enumerate(zip(self.pairs, run_all(scan, self._scan_jobs()), strict=True)):
            self.report("parallel text: counting lines", done, len(self.pairs))
            if not all(counts):
                raise ConfigurationError(f"{pair.files[counts.index(0)]} is empty: put its text there, or remove it")
            if len(set(counts)) > 1:
                longer = pair.files[counts.index(max(counts))]
                both = f"{pair.source} has {counts[0]:,} lines, but {counts[1]:,} in {pair.target}"
                found = f"{KINDS['misaligned']}: {both}"
                self._defects.add(Defect("misaligned", pair.language, str(longer), min(counts) + 1, found))
                continue
            aligned.append(pair)
            if pair.split == "train":
                lines.setdefault(pair.language, {})[pair] = counts[0]
        self._defects.refuse(self.policy)
        if not lines:
            raise ConfigurationError(f"{self.text.named}: no training text is left, all of it is misaligned")
        self.pairs = [pair for pair in aligned if pair.language in lines]
        with_dev = {pair.language for pair in self.pairs if pair.split == "dev"}
        self._name_without_dev(lines.keys() - with_dev - self.text.lacking.keys())
        return lines

    def _scan_jobs(self) -> Iterator[tuple[Path, PairFiles, int, int]]:
        """Yields the jobs; a corpus' sample is twice its share of the vocabulary's pairs, judged by file size."""
        most = self.text.vocabularies.pairs
        sizes: Corpora = {}
        for pair in self.pairs:
            if pair.split == "train":
                sizes.setdefault(pair.language, {})[pair] = pair.source.stat().st_size + 1
        shares = self._shares(sizes)
        for pair in self.pairs:
            wanted = min(int(2 * shares[pair] * most) + 1, most) if pair in shares else 0
            yield self._scanned(pair), pair, wanted, self.text.piece

    def _scanned(self, pair: PairFiles) -> Path:
        return self.draft.work("scan", pair.language, pair.split, str(pair.number))

    def _shares(self, sizes: Corpora) -> dict[PairFiles, float]:
        """Returns each corpus' share of the vocabularies' pairs: its part of the share of its language."""
        totals = [sum(of.values()) for of in sizes.values()]
        drawn = temperature_shares(totals, self.text.vocabularies.temperature)
        languages = zip(drawn, totals, sizes.values(), strict=True)
        return {pair: share * (size / total) for share, total, of in languages for pair, size in of.items()}

    def _train_vocabularies(self, lines: Corpora) -> None:
        wanted = self.text.vocabularies
        if wanted.shared:
            sides = [("vocabulary", wanted.source, [0, 1])]
        else:
            sides = [("source_vocabulary", wanted.source, [0]), ("target_vocabulary", wanted.target, [1])]
        refused = []
        for (key, size, columns), model in zip(sides, self.draft.models, strict=False):
            if not model.exists():
                sentences = [pair[column] for pair in self._vocabulary_pairs(lines) for column in columns]
                if not sentences:
                    _, found = readable(next(read_pieces(self.pairs[0], self.text.piece)), self.text.max_length)
                    first = found.examples[0] if found.examples else f"the first file is {self.pairs[0].source}"
                    raise ConfigurationError(f"{self.text.named}: no pair of lines has text on both sides; {first}")
                side = key.replace("_", " ")
                self.report(f"parallel text: {side}, {size:,} pieces by {len(sentences):,} sentences", 0, 0)
                try:
                    made = train_vocabulary(sentences, size, wanted.character_coverage, key, wanted.smaller)
                    with whole_file(model) as draft:
                        draft.write_bytes(made)
                except ConfigurationError as error:
                    refused.append(str(error))
        if refused:
            raise ConfigurationError("\n".join(refused))

    def _vocabulary_pairs(self, lines: Corpora) -> Iterator[tuple[str, str]]:
        """Yields pairs drawn with temperature from the samples; pairs of small languages may repeat."""
        total = min(self.text.vocabularies.pairs, sum(sum(of.values()) for of in lines.values()))
        for pair, share in self._shares(lines).items():
            sample = read_json(self._scanned(pair), Scanned, JSON_OF_WORK)["sample"]
            count = max(1, int(share * total)) if sample else 0
            yield from (
                sample[i * len(sample) // count if count < len(sample) else i % len(sample)] for i in range(count)
            )

    def _encode(self, run_all: RunAll, code: str, lines: Mapping[PairFiles, int], total: int) -> LanguageSummary:
        """Makes ids of a language's pieces, then shards of pieces; removes the pieces when all shards are there."""
        file = self.draft.work("shard", code)
        content = made_json(file, lambda: self._encoded(run_all, code, lines, total), EncodedLanguage)
        for left in self.draft.piece(code, 0).parent.glob(f"piece-{code}-??????.*"):
            left.unlink()
        self._defects.update(content, self.policy)
        self._done += sum(lines.values())
        self._held_out += content["held_out"]
        if len(lines) > 1:
            self._corpora[code] = content["corpora"]
        if not content["summary"].pairs:
            found = Defects()
            found.update(content, {})
            files = " and ".join(str(file) for pair in lines for file in pair.files)
            raise ConfigurationError(f"{files}: no pair of language '{code}' is left: {found.in_words(self.policy)}")
        return content["summary"]

    def _encoded(self, run_all: RunAll, code: str, lines: Mapping[PairFiles, int], total: int) -> dict[str, Any]:
        """Returns an `EncodedLanguage` as JSON."""
        defects, done, read, bounds = Defects(), self._done, list[tuple[str, int]](), list[Any]()
        held_out = list[HeldOut]()
        corpora = {str(pair.source): [0, number] for pair, number in lines.items()}
        shards = max(1, -(-sum(lines.values()) // self.text.sizes.shard))
        self.report("parallel text: token ids", done, total)

        def jobs() -> Iterator[tuple[Path, Callable[[], Any], type[EncodedPiece]]]:
            numbers = count()
            for piece in chain.from_iterable(read_pieces(pair, self.text.piece, numbers) for pair in lines):
                read.append((str(piece.files.source), len(piece.rows)))
                yield self.draft.piece(code, piece.number), partial(encode, self.draft, piece, shards), EncodedPiece

        for found in run_all(made_json, jobs()):
            file, rows = read[len(bounds)]
            done += rows
            self.report("parallel text: token ids", done, total)
            defects.update(found, self.policy)
            held_out += found["held_out"]
            bounds.append(np.array(found["bounds"]))
            corpora[file][0] += int(bounds[-1][0, -1])
        merged = self._merge(run_all, code, np.stack(bounds))
        named = {in_utf8(file): counts for file, counts in corpora.items()}
        return {"summary": asdict(merged), "corpora": named, "held_out": held_out, **defects.as_json()}

    def _merge(self, run_all: RunAll, code: str, bounds: Numbers) -> LanguageSummary:
        """Makes the shards of a language of its pieces. `bounds`: of the shards in each piece, see `encode`."""
        summaries = list[LanguageSummary]()
        of_shards = (
            (self.draft.work("shard", code, f"{n:05}"), partial(merge, self.draft, code, n, bounds[:, :, n : n + 2]))
            for n in range(bounds.shape[2] - 1)
        )
        self.report("parallel text: shards", 0, 0)
        for summary in run_all(made_json, ((*job, LanguageSummary) for job in of_shards)):
            summaries.append(summary)
            self.report("parallel text: shards", len(summaries), 0)
        return LanguageSummary.of_shards(summaries)

    def _read_held_out(self, languages: Iterable[str]) -> None:
        """Reads the pairs of dev and test files and writes their digests; unusable lines are dropped or refused."""
        digests: dict[str, list[int]] = {language: [] for language in languages}
        for pair in (pair for pair in self.pairs if pair.split != "train"):
            for piece in read_pieces(pair, self.text.piece):
                usable, defects = readable(piece, self.text.max_length)
                self._defects.update({"counts": {**defects.counts}, "defects": defects.examples}, self.policy)
                for place, *texts in usable:
                    self._held_out.append((pair.split, pair.language, piece.first + place, texts[0], texts[1]))
                    digests[pair.language].append(pair_digest(*texts))
        for language, of_language in digests.items():
            path = self.draft.work("held_out", language).with_suffix(".npy")
            save_array(path, np.array(of_language, np.uint64))

    def _write_held_out(self) -> None:
        """Writes the pairs of held-out files, and after them those of training files that are held out."""
        for split in ("dev", "test"):
            pairs = [pair for pair in self._held_out if pair[0] == split]
            with whole_file(self.draft.folder / f"{split}.jsonl") as file:
                lines = (json.dumps(pair[1:], ensure_ascii=False) + "\n" for pair in pairs)
                file.write_text("".join(lines), encoding="utf-8")
            if self.text.lacking:
                drawn = sum(split in self.text.lacking.get(pair[1], ()) for pair in pairs)
                self.report(f"parallel text: held out for {split}, a share of training pairs", drawn, drawn)
            if split == "dev":
                self._name_without_dev(self.text.lacking.keys() - {pair[1] for pair in pairs})

    def _name_without_dev(self, languages: Iterable[str]) -> None:
        for language in sorted(languages):
            found = f"language '{language}' {KINDS['no_dev']}: trained on, not evaluated"
            self._defects.add(Defect("no_dev", language, self.text.root or "data.train", 0, found))
        self._defects.refuse(self.policy)
