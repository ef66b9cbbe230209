"""Tests gpipe-report with whole and broken runs of gpipe-train."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpipe_cli.commands.report import main
from gpipe_cli.terminal.runs import FinishedRun, compare, read_run


def make_run(folder: Path, K: int, M: int, speed: float, **changes: Any) -> Path:
    """Writes the files of a run that gpipe-report reads."""
    pipeline = {"K": K, "M": M, "schedule": "gpipe", "remat": "except_last", "workers": "auto"}
    optimizer = {"lr": changes.get("lr", 0.1)}
    config = {"pipeline": pipeline, "optimizer": optimizer, "name": folder.name, "data": {"v": f"${{K{K}}}"}}
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    summary = {"K": K, "M": M, "workers": K, "loss": 2.5, "examples_per_second": speed, "stopped_by": "steps"}
    summary |= {
        "wall_seconds": changes.get("wall_seconds"),
        "bubble": 0.25,
        "bubble_predicted": 0.2,
        "evaluation": {"nll": 3.0, "bleu": 12.5, "bleu/de": 9.0},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


Capture = pytest.CaptureFixture[str]
FILES = ("report.html", "report.json", "report.svg")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sweeps" / "today"
    for number, (K, M, speed) in enumerate([(2, 1, 100.0), (2, 4, 150.0), (4, 1, 110.0), (4, 4, 220.0)]):
        make_run(folder / f"{number}_pipeline.K={K},pipeline.M={M}", K, M, speed)
    return folder


def report(out: Path, *paths: Path) -> list[dict[str, Any]]:
    assert main([*map(str, paths), f"output={out}"]) == 0
    rows: list[dict[str, Any]] = json.loads((out / "report.json").read_text(encoding="utf-8"))["rows"]
    return rows


def test_a_sweep_becomes_table_2(sweep: Path, tmp_path: Path) -> None:
    rows = report(tmp_path / "out", sweep)
    assert [(row["K"], row["M"]) for row in rows] == [(2, 1), (2, 4), (4, 1), (4, 4)]
    assert [row["normalised"] for row in rows] == [1.0, 1.5, 1.1, 2.2]
    assert [round(row["ideal"], 2) for row in rows] == [1.0, 1.6, 1.0, 2.29]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*FILES}


def test_the_printed_table_has_loss_bubble_and_scores(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    report(tmp_path / "out", sweep)
    header, _, first, *_ = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert header == "run K M loss examples/s × ideal bubble predicted nll bleu status"
    assert first == "0 2 1 2.5 100 1.00 1.00 25.0 % 20.0 % 3 12.5 done"


def test_runs_that_differ_in_k_and_m_alone_stand_in_a_matrix(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(K), K, 4 * K, 100.0, wall_seconds=10.0 * K) for K in (2, 4)]
    (grid,) = compare([read_run(run) for run in runs]).matrix()
    assert grid.columns == ["loss, seconds of a run", "M=8", "M=16"]
    assert grid.rows == [["K=2", "2.5 in 20 s", ""], ["K=4", "", "2.5 in 40 s"]]
    other = make_run(tmp_path / "other", 2, 1, 50.0, lr=0.2)
    assert not compare([read_run(run) for run in (*runs, other)]).matrix()


def test_runs_that_differ_elsewhere_have_references_of_their_own(sweep: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", 2, 1, 50.0, lr=0.2)
    rows = report(tmp_path / "out", sweep, other)
    assert rows[-1]["normalised"] == 1.0
    assert rows[-1]["settings"]["optimizer.lr"] == 0.2


def test_broken_runs_are_named_and_the_others_shown(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    (sweep / "0_pipeline.K=2,pipeline.M=1" / "summary.json").write_text('{"K": 2, ')
    failed = sweep / "4_x"
    failed.mkdir()
    (failed / "error.txt").write_text("worker 1 failed:\nTraceback (most recent …):\n  File ...\nValueError: no\n")
    killed = make_run(sweep / "5_x", 2, 8, 0.0)
    (killed / "summary.json").unlink()
    (killed / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0, "examples_per_second": 60.0}\n{"step": 2, "lo')
    os.truncate(killed / ".hydra" / "config.yaml", 1 << 40)
    rows = report(tmp_path / "out", sweep, tmp_path / "nowhere")
    status = [row["outcome"] for row in rows]
    assert "summary.json is damaged: Invalid JSON: EOF while parsing" in status[0]
    assert status[4] == "failed: ValueError: no"
    assert status[5].split("; ")[:2] == ["not finished, 1 steps on record", "config.yaml cannot be read"]
    assert status[5].endswith("metrics.jsonl: damaged and skipped: line 2")
    assert rows[5]["examples_per_second"] == 60.0
    assert rows[1]["normalised"] == 1.0, "the smallest K and M that has a speed"
    assert "nowhere is not there" in capsys.readouterr().err


def test_a_file_stands_for_its_run(sweep: Path, tmp_path: Path) -> None:
    folder = sweep / "3_pipeline.K=4,pipeline.M=4"
    assert len(report(tmp_path / "out", folder / "summary.json", folder)) == 1


def test_a_run_that_belongs_to_somebody_else_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    theirs = make_run(tmp_path / "run", 2, 4, 60.0)

    def refused(folder: str, trusted: list[str]) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(Path(folder) / "plan.json"))

    monkeypatch.setattr("gpipe_cli.commands.plan.advise", refused)
    assert len(report(tmp_path / "out", theirs)) == 1
    assert "plan.json cannot be written: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["output=x"], ["out=x", "y"], ["--runs=x", "y"], ["nowhere"]])
def test_without_runs_it_ends_with_an_error(words: list[str]) -> None:
    assert main(words) == 2


def test_an_option_that_each_run_has_typed_stands_for_the_keys_of_its_group() -> None:
    options = {"adam": {"optimizer.lr": 1, "optimizer.eps": 2}, "sgd": {"optimizer.lr": 1, "optimizer.momentum": 3}}
    runs = [FinishedRun(Path(name), "done", keys, [f"optimizer={name}"]) for name, keys in options.items()]
    assert compare(runs).differing == ["optimizer"]
    assert [run["settings"]["optimizer"] for run in compare(runs).facts] == ["adam", "sgd"]
