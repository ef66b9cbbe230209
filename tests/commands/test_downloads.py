"""Tests whole experiments on folders laid out as downloads are: train, kill, resume at another K, evaluate, report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import imagenet_layouts
import parallel_folder
import pytest
from run_files import rows

STEPS, KILLED_AFTER = 12, 5
IMAGENET = [
    "experiment=imagenet/amoebanet_b_18_512", "data.classes=3", "model.L=3", "data.batch_size=4", "pipeline.M=2",
]  # fmt: skip

CORPORA = {  # by name: split, first and last pair
    "Europarl.de-en": ("train", 0, 180),
    "WMT-News.de-en": ("train", 180, 300),
    "newstest2019.de-en": ("dev", 0, 20),
}


def moses(root: Path) -> list[str]:
    """Writes what three archives of OPUS and WMT hold, one for evaluation; returns the words to train on them."""
    for name, (split, first, last) in CORPORA.items():
        pairs = parallel_folder.pairs_of("de", last, split)[first:]
        for side, lines in zip(("de", "en"), zip(*pairs, strict=True), strict=True):
            parallel_folder.write(root / f"{name}.{side}", lines)
        for other in ("README", "LICENSE", f"{name}.xml"):
            parallel_folder.write(root / other, ["<no sentence/>"])
    return ["experiment=nmt/t_64_16384_32", "data.dev={de: newstest2019.de-en.de}", "task.generation.beam=2"]


def imagenet(root: Path) -> list[str]:
    """Writes class folders, a flat val and the devkit with its labels; returns the words to train on them."""
    imagenet_layouts.flat_with_devkit(root)
    return IMAGENET


def imagenet_tars(root: Path) -> list[str]:
    """Writes the official tars, not unpacked, and the devkit; returns the words to train on them."""
    imagenet_layouts.official_tars(root)
    return IMAGENET


def command(name: str, *words: str, folder: Path, killed_after: int | None = None) -> None:
    """Runs a command of this clone to its end, or kills it after so many steps of its run."""
    line = [sys.executable, "-m", f"gpipe_cli.commands.{name}", *words]
    with subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        metrics = folder / "run" / "metrics.jsonl"
        while killed_after is not None and running.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= killed_after:
                running.send_signal(signal.SIGKILL)
            time.sleep(0.01)
        said = running.communicate(timeout=240)[0]
    assert running.returncode == (0 if killed_after is None else -signal.SIGKILL), said


@pytest.mark.slow
@pytest.mark.parametrize("download", [moses, imagenet, imagenet_tars])
def test_an_experiment_on_a_download_is_killed_resumed_at_another_k_evaluated_and_reported(
    download: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    words = [
        "debug=tiny", *download(tmp_path / "data"), f"data.root={tmp_path / 'data'}", "hydra.run.dir=run",
        f"trainer.steps={STEPS}", "trainer.evaluate_every=6", "checkpoint.resume=auto", "logging.tensorboard=false",
    ]  # fmt: skip
    command("train", *words, "pipeline.K=2", "pipeline.workers=2", folder=tmp_path, killed_after=KILLED_AFTER)
    command("train", *words, "pipeline.K=3", "pipeline.workers=1", folder=tmp_path)
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["data_defects"] == {}

    command("eval", "run", "trust=[data]", "pipeline.K=1", "pipeline.workers=1", "output=again", folder=tmp_path)
    found = json.loads((tmp_path / "again" / "evaluation.json").read_text())
    assert (found["step"], found["K"]) == (STEPS, 1)
    assert found["numbers"] == summary["evaluation"]
    command("report", "run", "output=report", folder=tmp_path)
    (reported,) = json.loads((tmp_path / "report" / "report.json").read_text())["rows"]
    assert (reported["status"], reported["K"], reported["loss"]) == ("done", 3, summary["loss"])
