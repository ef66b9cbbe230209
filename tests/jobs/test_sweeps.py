"""Tests the table of a sweep's runs, and the names of their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.jobs.configuration import LONGEST_NAME, folder_name
from gpipe_cli.terminal.run_table import Spread, compare, over_seeds
from gpipe_cli.terminal.runs import FinishedRun


def run(number: int, accuracy: float | None, status: str = "done", **settings: Any) -> FinishedRun:
    evaluation = {} if accuracy is None else {"accuracy": accuracy}
    typed = {key: str(value) for key, value in settings.items()}
    return FinishedRun(Path(str(number)), status, settings, typed, K=1, M=1, evaluation=evaluation)


def test_a_spread_is_written_with_two_digits() -> None:
    assert [str(Spread(*values)) for values in ((0.934567, 0.012345), (0.5, 0.0), (3703.2, 632.4))] == [
        *("0.9346 ± 0.012", "0.5 ± 0", "3,703 ± 632.4"),
    ]


def test_seeds_are_taken_together_for_each_combination_of_the_other_keys() -> None:
    runs = [run(2 * i + s, 0.1 * i + 0.02 * s, seed=s, lr=i) for i in range(3) for s in range(2)]
    found = over_seeds([*runs, run(6, None, "failed", seed=3, lr=0), run(7, 0.5, seed=1, lr=7)])
    assert [(seeds.settings, [run.folder.name for run in seeds.runs]) for seeds in found] == [
        *(({"lr": 0}, ["0", "1"]), ({"lr": 1}, ["2", "3"]), ({"lr": 2}, ["4", "5"])),
    ]
    assert found[1].figures["accuracy"].mean == pytest.approx(0.11)
    assert over_seeds([run(0, 0.5, lr=1), run(1, 0.5, lr=2)]) == []


def test_an_option_that_each_run_has_typed_stands_for_the_keys_of_its_group() -> None:
    options = {"adam": {"optimizer.lr": 1, "optimizer.eps": 2}, "sgd": {"optimizer.lr": 1, "optimizer.momentum": 3}}
    runs = [FinishedRun(Path(name), "done", keys, {"optimizer": name}) for name, keys in options.items()]
    assert compare(runs).differing == ["optimizer"]
    assert [row["optimizer"] for row in compare(runs).rows] == ["adam", "sgd"]


def test_names_of_job_folders_are_safe() -> None:
    assert folder_name("++model.L=2,data.root=/a b/c") == "model.L=2,data.root=_a_b_c"
    assert len(folder_name("x" * 500)) == LONGEST_NAME
    assert folder_name(None, "transformer") == "transformer"
