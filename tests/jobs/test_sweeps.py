"""Tests the table of a sweep's runs, and the names of their folders."""

from __future__ import annotations

from pathlib import Path

from gpipe_cli.jobs.configuration import LONGEST_NAME, folder_name
from gpipe_cli.terminal.runs import FinishedRun, compare


def test_an_option_that_each_run_has_typed_stands_for_the_keys_of_its_group() -> None:
    options = {"adam": {"optimizer.lr": 1, "optimizer.eps": 2}, "sgd": {"optimizer.lr": 1, "optimizer.momentum": 3}}
    runs = [FinishedRun(Path(name), "done", keys, [f"optimizer={name}"]) for name, keys in options.items()]
    assert compare(runs).differing == ["optimizer"]
    assert [run["settings"]["optimizer"] for run in compare(runs).facts] == ["adam", "sgd"]


def test_names_of_job_folders_are_safe() -> None:
    assert folder_name("++model.L=2,data.root=/a b/c") == "model.L=2,data.root=_a_b_c"
    assert len(folder_name("x" * 500)) == LONGEST_NAME
    assert folder_name(None, "transformer") == "transformer"
