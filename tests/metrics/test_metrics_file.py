"""Tests the files that a run writes: what other programs read of it, on disks that are full, read-only or gone."""

import math
import subprocess
from pathlib import Path

import pytest
from inline_run import train_inline
from own_model import WORDS
from run_files import rows
from small_disk import fill, small_disk

from gpipe_cli.checkpoint.files import latest
from gpipe_cli.disk import DiskError
from gpipe_cli.metrics.metrics_file import MetricsFile


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", 0)
    file.write({"step": 1, "loss": 0.5})
    file.write({"step": 2, "loss": math.nan})
    assert rows(tmp_path / "m.jsonl") == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]


def test_a_resumed_run_replaces_the_rows_after_its_checkpoint_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step"')
    file = MetricsFile(path, 2)
    file.write({"step": 3, "loss": 1.0})
    assert rows(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.0}]


# -- disks -----------------------------------------------------------------------------------------------------------


def test_a_run_whose_disk_is_full_ends_in_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "size=900k"), pytest.raises(DiskError) as caught:
        train_inline(tmp_path / "run", "debug=tiny", "trainer.steps=1", "trainer.evaluate_first=false")
    text = str(caught.value)
    assert "\n" not in text and "step_00000001.partial cannot be written: No space left on device (room left:" in text
    assert text.endswith("type the same again: this run had saved no step")


def test_a_run_goes_on_although_the_metrics_find_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", "size=8k") as folder:
        (folder / "metrics").touch()
        fill(folder)
        (tmp_path / "run").mkdir()
        file = tmp_path / "run" / "metrics.jsonl"
        file.touch()
        subprocess.run(["mount", "--bind", folder / "metrics", file], check=True)
        try:
            _, events = train_inline(tmp_path / "run", *WORDS, "trainer.steps=2", "pipeline.K=1")
        finally:
            subprocess.run(["umount", file], check=True)
    said = [event["text"] for event in events if event["kind"] == "warning"]
    assert sum("metrics.jsonl cannot be written: No space left on device" in text for text in said) == 1
    chosen = latest(tmp_path / "run")[0]
    assert chosen is not None and chosen.step == 2
