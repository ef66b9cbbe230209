"""Tests that the findings' pieces are run once each, go on after an interruption, and end in the page's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.findings import runs
from benchmarks.findings.bootstrap import bleu_difference, seed_difference, sentence_counts
from benchmarks.findings.pieces import Log, read_experiments
from gpipe_cli.tasks.translation import corpus_bleu

EXPERIMENTS = Path(runs.__file__).with_name("experiments.yaml")
TINY = {
    "common": ["debug=tiny", "launch.inline=true", "pipeline.K=1", "pipeline.M=2", "trainer.evaluate_first=false"],
    "depth": {
        "words": ["task.generation.beam=1", "task.generation.per_language_at_end=1", "trainer.evaluate_every=null"],
        "steps": 4,
        "variants": {"narrow": ["model.L=1"], "deep": ["model.L=2"]},
        "rates": [0.001, 0.01],
        "rate_share": 0.5,
        "seeds": [1, 2],
        "test": ["task.generation.per_language_at_end=5"],
        "figures": ["bleu_average", "nll"],
        "compare": [["deep", "narrow"]],
        "minutes": 0.1,
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "experiments.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    (tmp_path / "page.md").write_text("# Findings\n\n<!-- depth -->\n<!-- end -->\n\nkept\n")
    return tmp_path


def record(piece: Any, log: Log, **metrics: float | None) -> None:
    found = {"experiment": piece.experiment.name, "piece": piece.name, "words": piece.words(log), "metrics": metrics}
    log.add({**found, "minutes": 1.0, "commit": "abc"})


def test_full_runs_take_the_rate_with_the_lowest_dev_loss(folder: Path) -> None:
    depth, log = read_experiments(folder / "experiments.yaml")["depth"], Log()
    full = [piece for piece in depth.pieces() if piece.rate is None and piece.variant == "deep"]
    for rate, piece in enumerate(depth.search("deep")):
        assert full[0].words(log) is None, "the search is not complete"
        record(piece, log, nll=None if rate == 0 else 2.0)
    assert "optimizer.lr=0.01" in (full[0].words(log) or ())
    assert "trainer.steps=4" in (full[0].words(log) or ()) and "trainer.steps=2" in (piece.words(log) or ())


def test_a_record_made_with_other_words_does_not_count(folder: Path) -> None:
    depth, log = read_experiments(folder / "experiments.yaml")["depth"], Log()
    piece = depth.search("deep")[0]
    record(piece, log, nll=1.0)
    assert log.record(piece)
    TINY_CHANGED = {**TINY, "depth": {**TINY["depth"], "variants": {"deep": ["model.L=3"]}}}  # type: ignore[dict-item]
    (folder / "experiments.yaml").write_text(yaml.safe_dump(TINY_CHANGED))
    changed = read_experiments(folder / "experiments.yaml")["depth"].search("deep")[0]
    assert log.record(changed) is None


def test_the_bootstrap_counts_what_bleu_counts(tmp_path: Path) -> None:
    pairs = [
        ("a b c d e f", "a b c d x f"),
        ("one two three four five", "one two three four five"),
        ("short", "shorter"),
    ]
    (tmp_path / "de.txt").write_text("".join(f"source\t{reference}\t{output}\n" for reference, output in pairs))
    counts = sentence_counts(tmp_path)["de"]
    whole = [sum(of) for of in zip(*counts, strict=True)]
    precision = [matches / max(1, sum(max(0, of[0] - n) for of in counts)) for n, matches in enumerate(whole[2:])]
    bleu = 100 * (precision[0] * precision[1] * precision[2] * precision[3]) ** 0.25
    assert whole[0] == whole[1]  # no brevity penalty
    assert bleu == pytest.approx(corpus_bleu([output for _, output in pairs], [of for of, _ in pairs])[0])


def test_a_system_does_not_differ_from_itself_and_a_worse_one_does() -> None:
    good, bad = [[6, 6, 6, 5, 4, 3]] * 20, [[6, 6, 3, 1, 1, 1]] * 20
    assert bleu_difference({"de": good}, {"de": good}, ["de"]) == (0, 0)
    mean, half = bleu_difference({"de": good}, {"de": bad}, ["de"])
    assert mean > 50 and half < 1


def test_the_interval_over_seeds_is_student_s() -> None:
    assert seed_difference([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]) == (2, pytest.approx(4.303 / 3**0.5))
