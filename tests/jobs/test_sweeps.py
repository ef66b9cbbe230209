"""Tests what a sweep is named, counts, and says of runs that differ in their seeds alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_cli.jobs import sweep
from gpipe_cli.terminal.runs import FinishedRun


def job(number: int, accuracy: float | None, status: str = "done", **overrides: str) -> sweep.JobResult:
    evaluation = {} if accuracy is None else {"accuracy": accuracy}
    return sweep.JobResult(number, overrides, FinishedRun(Path(), status, K=1, M=1, evaluation=evaluation))


def test_a_spread_is_written_with_two_digits() -> None:
    assert [str(sweep.Spread(*values)) for values in ((0.934567, 0.012345), (0.5, 0.0), (3703.2, 632.4))] == [
        *("0.9346 ± 0.012", "0.5 ± 0", "3,703 ± 632.4"),
    ]


def test_seeds_are_taken_together_for_each_combination_of_the_other_swept_keys() -> None:
    jobs = [job(2 * i + s, 0.1 * i + 0.02 * s, seed=str(s), lr=str(i)) for i in range(3) for s in range(2)]
    found = sweep.over_seeds(jobs)
    assert [(seeds.overrides, [job.number for job in seeds.jobs]) for seeds in found] == [
        *(({"lr": "0"}, [0, 1]), ({"lr": "1"}, [2, 3]), ({"lr": "2"}, [4, 5])),
    ]
    assert found[1].evaluation["accuracy"].mean == pytest.approx(0.11)


def test_jobs_that_failed_and_seeds_that_stand_alone_have_no_spread() -> None:
    jobs = [job(0, 0.5, seed="1", lr="1"), job(1, None, "failed", seed="2", lr="1"), job(2, 0.5, seed="1", lr="2")]
    assert sweep.over_seeds(jobs) == []
    assert sweep.over_seeds([job(0, 0.5, lr="1"), job(1, 0.5, lr="2")]) == []


def test_the_number_of_jobs_is_known_for_choices_and_ranges() -> None:
    assert sweep.count_jobs(["a=1,2,3", "b=range(5)", "c=x", "d=choice(p,q)"]) == 30


def test_names_of_job_folders_are_safe() -> None:
    assert sweep.folder_name("data.root=/a b/c,pipeline.K=2") == "data.root=_a_b_c,pipeline.K=2"
    assert len(sweep.folder_name("x" * 500)) == sweep.LONGEST_NAME
    assert sweep.folder_name(None, "transformer") == "transformer"
