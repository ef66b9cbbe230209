"""Builds the CLDR corpus as a store, once for each CLDR version and parameters; the folder's name holds both."""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ...cpu import usable_cores
from ...errors import ConfigurationError
from ..defects import DEFECTS, Defects
from ..prepared import in_processes, prepared_folder
from ..sampling import temperature_shares
from ..source import Report
from ..store import FORMAT, LONGEST, Sizes, Store, StoreWriter, interleave
from ..vocabulary import Vocabulary, smaller_notice, train_vocabulary
from .languages import corpus_size
from .pairs import Pair, held_out_pairs, train_pairs
from .strings import cldr_version

log = logging.getLogger(__name__)

VOCABULARY_PAIRS = 56_000  # given to SentencePiece: more cost time and change little
VOCABULARY_TEMPERATURE = 5.0
SMALL = 50_000  # pairs, which one process composes in about two seconds


@dataclass(frozen=True)
class CorpusParameters:
    """Holds all that decides a corpus, besides CLDR's version."""

    languages: tuple[str, ...]
    largest: int
    smallest: int
    vocabulary: int  # at most 65,536: ids are stored in two bytes
    seed: int
    max_length: int = LONGEST  # tokens of a side with its end token; longer pairs are left out
    smaller_vocabulary: bool = False  # where the corpus supports fewer pieces

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the wanted number of training pairs of each language."""
        return {code: corpus_size(code, self.largest, self.smallest) for code in self.languages}

    def folder(self) -> str:
        digest = hashlib.blake2b(json.dumps([FORMAT, asdict(self)]).encode(), digest_size=6).hexdigest()
        return f"translation-{cldr_version()}-{digest}"


def open_store(parameters: CorpusParameters, cache_dir: str | None, report: Report) -> Store:
    """Returns the corpus; builds it first if it is not in the cache (about 25 s on two cores for all 102 languages).

    Warns if the vocabulary is smaller than asked for, or if more than one pair in a thousand was too long.

    Raises:
        ConfigurationError: the vocabulary size does not fit the corpus, or `max_length` leaves a language no pair.
        DiskError: the cache cannot be written.
    """
    make = partial(_build, parameters, report=report)
    folder = prepared_folder(cache_dir, parameters.folder(), make, report, Store.JSON)
    store = Store(folder)
    if notice := smaller_notice("vocabulary", parameters.vocabulary, store.source_vocabulary):
        log.warning("%s", notice)
    used, left_out = sum(store.sizes.values()), Defects.read(folder)[0].totals().get("too_long", 0)
    if 1_000 * left_out > used:
        counts = f"{left_out:,} of {used + left_out:,} pairs"
        log.warning("%s are left out: longer than data.max_length=%d tokens", counts, parameters.max_length)
    return store


def _build(parameters: CorpusParameters, folder: Path, report: Report) -> None:
    small = sum(parameters.sizes.values()) < SMALL
    with in_processes(1 if small else usable_cores()) as run_all:  # their number changes no byte
        corpus: dict[str, list[Pair]] = {}
        drawn = [(code, size, parameters.seed) for code, size in parameters.sizes.items()]
        for done, ((code, *_), pairs) in enumerate(zip(drawn, run_all(train_pairs, drawn), strict=True), start=1):
            report("translation corpus: sentences", done, len(drawn))
            corpus[code] = pairs
        jobs = [(parameters, split) for split in ("dev", "test")]
        for (_, split), lines in zip(jobs, run_all(_held_out_lines, jobs), strict=True):
            (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    report("translation corpus: vocabulary", 0, 1)
    sentences, smaller = _vocabulary_sentences(corpus), parameters.smaller_vocabulary
    model = train_vocabulary(sentences, parameters.vocabulary, smaller=smaller)
    (folder / "source.model").write_bytes(model)
    vocabulary = Vocabulary(model)
    writer = StoreWriter(folder, wide=False)
    for done, (code, pairs) in enumerate(corpus.items()):
        report("translation corpus: token ids", done, len(corpus))
        _write_language(writer, code, pairs, vocabulary, parameters.max_length)
    too_long = {code: {"too_long": len(pairs) - writer.languages[code].pairs} for code, pairs in corpus.items()}
    (folder / DEFECTS).write_text(json.dumps({"counts": too_long}, indent=1), encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("cldr.NOTICE"), folder / "NOTICE")
    writer.finish(Sizes().block, {"cldr": cldr_version(), "parameters": asdict(parameters)})
    report("translation corpus", 1, 1)


def _held_out_lines(parameters: CorpusParameters, split: str) -> str:
    return "".join(
        json.dumps([code, item, *pair], ensure_ascii=False) + "\n"
        for code in parameters.languages
        for item, pair in held_out_pairs(code, split, parameters.seed)
    )


def _write_language(
    writer: StoreWriter, code: str, pairs: Sequence[Pair], vocabulary: Vocabulary, max_length: int
) -> None:
    """Writes the pairs in their order, without those that are too long."""
    sources, targets = (vocabulary.encode(side) for side in zip(*pairs, strict=True))
    kept = [i for i, (s, t) in enumerate(zip(sources, targets, strict=True)) if max(len(s), len(t)) < max_length]
    if not kept:
        raise ConfigurationError(f"data.max_length={max_length} leaves no pair of language '{code}': raise it")
    tokens, lengths = interleave([sources[i] for i in kept], [targets[i] for i in kept], wide=False)
    writer.add(code, tokens, lengths)


def _vocabulary_sentences(corpus: dict[str, list[Pair]]) -> Iterator[str]:
    """Yields both sides of pairs drawn with temperature, so that small languages get pieces of their own."""
    wanted = min(VOCABULARY_PAIRS, sum(map(len, corpus.values())))
    shares = temperature_shares([len(pairs) for pairs in corpus.values()], VOCABULARY_TEMPERATURE)
    for pairs, share in zip(corpus.values(), shares, strict=True):
        for number in range(max(1, int(share * wanted))):
            yield from pairs[number % len(pairs)]
