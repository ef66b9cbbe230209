"""Tests that every benchmark writes its figures, at sizes too small to measure speed, and intervals of findings."""

import json
import re
import sys
from pathlib import Path

import pytest
from processes import run, succeeded

from benchmarks.chosen import answers, gaps
from benchmarks.common import ROOT
from benchmarks.findings.bootstrap import bleu_difference, seed_difference, sentence_counts
from gpipe_cli.tasks.translation import corpus_bleu

SMALL = {
    "chosen": "gaps --quick",
    "emulated": "--K 2 --M 2 --seconds 0.02 --repetitions 1",
    "overhead": "--sizes tiny --repetitions 2",
    "concepts": "",
    "largest": "--quick",
    "receives": "--quick",
    "quality": "--quick --jobs transformer_lm_small",
    "starts": "--quick",
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("name", SMALL)
def test_the_benchmark_prints_a_table_and_writes_its_figures(name: str, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    words = ["-m", f"benchmarks.{name}", "--output", output, *SMALL[name].split()]
    said = succeeded(run(sys.executable, *words, cwd=ROOT))
    figures = json.loads(output.read_text())
    assert figures["rows"]
    assert "\n|---|---" in said
    assert figures["machine"]["torch"]


def test_every_benchmark_is_tried() -> None:
    folder = ROOT / "benchmarks"
    scripts = {path.stem for path in folder.glob("*.py") if re.search(r"def main\(\)", path.read_text())}
    assert scripts == set(SMALL)


def test_no_chosen_pipeline_is_faster_than_its_bound_or_larger_than_memory() -> None:
    plans = list(answers(cases=3))
    assert all(plan.fits and plan.bound_of_any_cut_seconds is not None for plan in plans)
    assert all(plan.bound_of_any_cut_seconds <= plan.bound_seconds <= plan.step_seconds for plan in plans)
    assert sum(row["cases"] for row in gaps(plans)) == 3


# -- intervals around the differences that the findings report -------------------------------------------------------


def test_the_bootstrap_counts_what_bleu_counts(tmp_path: Path) -> None:
    pairs = [("a b c d e f", "a b c d x f"), ("one two three four five",) * 2, ("short", "shorter")]
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
