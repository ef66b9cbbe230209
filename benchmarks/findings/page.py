"""Draws the tables of docs/measurements/findings.md from the log, between the markers of each experiment."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.common import table_of
from benchmarks.findings.bootstrap import bleu_difference, seed_difference
from benchmarks.findings.pieces import Experiment, Log, Piece
from benchmarks.findings.runs import sentences_name
from gpipe_cli.metrics.translation_scores import LEVELS, resource_levels

NAMES = {"loss_end": "training loss, mean of the last tenth", "grad_norm_max": "largest gradient norm"}
NAMES |= {"nll": "loss of held-out data", "bleu_average": "BLEU, mean of languages"}


def draw(page: Path, experiments: Sequence[Experiment], log: Log, sentences: Path) -> None:
    """Replaces the text between <!-- NAME --> and <!-- end --> of each experiment."""
    text = page.read_text(encoding="utf-8")
    for of in experiments:
        block = "\n\n".join(blocks(of, {one.name: one for one in experiments}, log, sentences))
        pattern = rf"<!-- {of.name} -->\n.*?<!-- end -->"
        text, found = re.subn(pattern, lambda _: f"<!-- {of.name} -->\n{block}\n<!-- end -->", text, flags=re.DOTALL)  # noqa: B023
        assert found == 1, f"{page}: no place for {of.name}"
    page.write_text(text, encoding="utf-8")


def blocks(of: Experiment, all_of: Mapping[str, Experiment], log: Log, sentences: Path) -> Iterator[str]:
    """Yields an experiment's tables, its costs, and the pieces that have not run."""
    pieces = list(of.pieces())
    records = [record for piece in pieces if (record := log.record(piece))]
    commits = ", ".join(sorted({record["commit"] for record in records}))
    minutes = sum(record["minutes"] for record in records)
    cost = f": {minutes:.0f} minutes, {commits}" if records else ""
    yield f"`--only {of.name}`; {len(records)} of {len(pieces)} pieces{cost}."
    missing = Counter(piece.variant for piece in pieces if log.record(piece) is None)
    if not records:
        yield "**Not run.**"
    elif missing:
        yield "**Not run:** " + ", ".join(f"{variant} ({count} pieces)" for variant, count in missing.items()) + "."
    if of.rates and not of.seeds and any(log.record(p) for variant in of.variants for p in of.search(variant)):
        yield rates(of, log)
    if rows := list(full_runs(of, log)):
        yield table_of(rows)
        if found := list(differences(of, all_of, log, sentences)):
            yield table_of(found)


def rates(of: Experiment, log: Log) -> str:
    """Returns a table of the search's figure: variants down, rates across."""
    rows, figure = [], of.rate_figure
    for variant in of.variants:
        row: dict[str, object] = {f"{NAMES.get(figure, figure)}, by rate": variant}
        for piece in of.search(variant):
            record = log.record(piece)
            value = record["metrics"].get(figure) if record else None
            shown = f"{value:.3f}" if value is not None else "not finite" if record else "–"
            row[f"{piece.rate:g}"] = shown
        rows.append(row)
    return table_of(rows)


def full_runs(of: Experiment, log: Log) -> Iterator[dict[str, object]]:
    """Yields a row for each variant: its rate, and each figure's mean over seeds with lowest and highest."""
    last: dict[str, object] = {}
    for variant in of.variants:
        found = [record for seed in of.seeds if (record := log.record(Piece(of, variant, seed)))]
        if not found:
            continue
        row: dict[str, object] = {"variant": variant}
        if of.rates:
            row["rate"] = f"{of.chosen_rate(variant, log):g}"
        row["seeds"] = len(found)
        for figure in of.figures:
            values = [record["metrics"][figure] for record in found]
            low, high = (shown(figure, value) for value in (min(values), max(values)))
            between = f" ({low}…{high})" if len(found) > 1 else ""
            row[NAMES.get(figure, figure)] = shown(figure, fmean(values)) + between
        yield row
        copies = {name: found[0]["metrics"].get(f"copying_{name}") for name in of.figures}
        row = {NAMES.get(name, name): shown(name, value) for name, value in copies.items() if value is not None}
        if row and row != last:  # bilingual variants have test sets of their own
            yield {"variant": "copying the source", **row}
        last = row


def shown(figure: str, value: float) -> str:
    return f"{100 * value:.1f}%" if "accuracy" in figure else f"{value:.1f}" if "bleu" in figure else f"{value:.3f}"


def differences(
    of: Experiment, all_of: Mapping[str, Experiment], log: Log, sentences: Path
) -> Iterator[dict[str, str]]:
    """Yields a row for each pair of variants: differences of BLEU for each seed, else of the first figure over seeds.

    Each has half of its 95 % interval.
    """
    for names in of.compare:
        row = {"difference, 95 %": " − ".join(names)}
        split = [name.rpartition("/") for name in names]
        pairs = [[Piece(all_of.get(other, of), variant, seed) for other, _, variant in split] for seed in of.seeds]
        found = [pair for pair in pairs if all(log.record(piece) for piece in pair)]
        if of.test is not None:
            for pair in found:
                row |= bleu_differences(pair[0].seed, *(sentences / sentences_name(piece) for piece in pair))
        elif found:
            records = [[log.record(piece) or {} for piece in pair] for pair in found]
            one, other = zip(*([of_one["metrics"][of.figures[0]] for of_one in pair] for pair in records), strict=True)
            mean, half = seed_difference(one, other)
            interval = "" if len(found) < 3 else f"±{100 * half:.1f}"
            row[f"{of.figures[0]}, points"] = f"{100 * mean:+.1f}{interval}"
        if found:
            yield row


def bleu_differences(seed: int, one: Path, other: Path) -> dict[str, str]:
    """Returns the difference of BLEU of two runs: over all languages, and over each third of them by training pairs."""
    mine, theirs = (json.loads(path.read_text()) for path in (one, other))
    levels = resource_levels(mine["sizes"])
    groups = {"all": [code for code in mine["counts"] if code in theirs["counts"]]}
    if len(groups["all"]) > 1:
        groups |= {level: [code for code in groups["all"] if levels[code] == level] for level in LEVELS}
    found = {}
    for group, languages in groups.items():
        mean, half = bleu_difference(mine["counts"], theirs["counts"], languages)
        found[f"{group}, seed {seed}" if len(groups) > 1 else f"BLEU, seed {seed}"] = f"{mean:+.1f}±{half:.1f}"
    return found
