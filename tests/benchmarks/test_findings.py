"""Tests that the findings' pieces are run once each, go on after an interruption, and end in the page's tables."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.findings import runs
from benchmarks.findings.__main__ import main
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


class Interrupted(Exception):
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "experiments.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    (tmp_path / "page.md").write_text("# Findings\n\n<!-- depth -->\n<!-- end -->\n\nkept\n")
    return tmp_path


def findings(folder: Path, *words: str) -> None:
    places = {"experiments": "experiments.yaml", "page": "page.md", "runs": "runs"}
    main([*(word for name, file in places.items() for word in (f"--{name}", str(folder / file))), *words])


@pytest.mark.slow
def test_interrupted_pieces_go_on_and_their_figures_reach_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[Sequence[str]] = []

    def here(command: str, words: Sequence[str]) -> None:
        """Runs a command in this process; the seventh is lost after its first half."""
        typed.append(words)
        module = importlib.import_module(f"gpipe_cli.commands.{command.removeprefix('gpipe-')}")
        assert module.main(list(words)) == 0
        if len(typed) == 7:
            run = Path(words[-1].removeprefix("hydra.run.dir="))
            (run / "summary.json").unlink()
            shutil.rmtree(run / "checkpoints" / "step_00000004")
            raise Interrupted

    monkeypatch.setattr(runs, "run_command", here)
    with pytest.raises(Interrupted):
        findings(folder)
    findings(folder)
    assert len(typed) == 4 + 4 * 2 + 1  # the search, four runs with their tests, and the one that was interrupted
    assert [words for words in typed if "checkpoint.resume=auto" in words] == [[*typed[6], "checkpoint.resume=auto"]]
    records = [json.loads(line) for line in (folder / "page" / "log.jsonl").read_text().splitlines()]
    assert len(records) == 8 and all(record["metrics"]["nll"] > 0 for record in records)
    page = (folder / "page.md").read_text()
    assert "8 of 8 pieces: " in page and page.endswith("\nkept\n")
    assert "| low, seed 2 |" in page
    findings(folder)
    assert len(typed) == 13, "nothing is left to run"


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


def test_what_has_not_run_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.findings.__main__.work", lambda *_: None)
    findings(folder)
    page = (folder / "page.md").read_text()
    assert "0 of 8 pieces." in page and "**Not run.**" in page


def test_all_experiments_take_at_most_three_hours_of_two_cores_by_estimate() -> None:
    pieces = [piece for of in read_experiments(EXPERIMENTS).values() for piece in of.pieces()]
    assert sum(piece.minutes for piece in pieces) <= 2 * 180


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


def test_the_second_half_of_the_digits_has_a_hundred_training_images(tmp_path: Path) -> None:
    found = runs.digit_folder(tmp_path / "second", "second")
    assert sorted(of.name for of in (found / "train").iterdir()) == ["5", "6", "7", "8", "9"]
    assert len(list(found.glob("train/*/*.png"))) == 100 and len(list(found.glob("val/*/*.png"))) == 180
