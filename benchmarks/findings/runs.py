"""Runs one piece, which goes on where it was interrupted, and makes its record for the log."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks import messages
from benchmarks.common import ROOT
from benchmarks.findings.bootstrap import sentence_counts
from benchmarks.findings.pieces import Log, Piece, Record
from gpipe_cli.benchmarks.tables.workers import run_command

DIGITS = {"first": (range(5), None), "second": (range(5, 10), 20)}  # classes, training images of each (None: all)
TRAINING_IMAGES = 1437  # the same split as data=digits
WHITE, SIDE = 16, 32  # brightest value of the stored images; pixels of a side as written


def complete(folder: Path) -> bool:
    """Says whether a run directory holds a run that reached its last step."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["stopped_by"] == "steps"


def run(piece: Piece, log: Log, runs: Path, sentences: Path) -> Record:
    """Trains, evaluates and returns the record.

    Args:
        runs: folder of all run directories.
        sentences: folder for what the bootstrap needs of each translated sentence.
    """
    words, folder, began = piece.words(log), runs / piece.folder, time.monotonic()
    assert words is not None, "the command asks for pieces only that are ready"
    typed = folder / "findings.json"
    if typed.is_file() and json.loads(typed.read_text()) != words:
        shutil.rmtree(folder)  # of an earlier version of the experiment
    if not complete(folder):
        resumed = any(folder.glob("checkpoints/step_*"))
        folder.mkdir(parents=True, exist_ok=True)
        typed.write_text(json.dumps(words))
        filled = [_filled(word, piece, runs) for word in words]
        run_command("gpipe-train", [*filled, f"hydra.run.dir={folder}", *["checkpoint.resume=auto"] * resumed])
    metrics = training_figures(folder)
    if piece.experiment.test is not None and piece.rate is None:
        run_command("gpipe-eval", [str(folder), "split=test", f"output={folder / 'test'}", *piece.experiment.test])
        report = json.loads((folder / "test" / "evaluation.json").read_text())
        metrics |= {name: value for name, value in report["numbers"].items() if "/" not in name}
        counts = {"sizes": report["sizes"], "counts": sentence_counts(folder / "test" / "translations")}
        texts = {path.stem: path.read_text("utf-8").split("\n")[:-1] for path in folder.glob("test/translations/*.txt")}
        sides = {code: [*zip(*(line.split("\t")[:2] for line in lines), strict=True)] for code, lines in texts.items()}
        metrics |= {f"copying_{name}": of for name, of in messages.copying(sides, report["sizes"]).items()}
        sentences.mkdir(parents=True, exist_ok=True)
        (sentences / sentences_name(piece)).write_text(json.dumps(counts, separators=(",", ":")) + "\n")
    record: Record = {"experiment": piece.experiment.name, "piece": piece.name, "seed": piece.seed}
    rounded = {name: float(f"{of:.6g}") if isinstance(of, float) else of for name, of in metrics.items()}
    record |= {"steps": piece.steps, "metrics": rounded}
    steps = (json.loads(line)["seconds"] for line in (folder / "metrics.jsonl").read_text().splitlines())
    minutes = max(time.monotonic() - began, sum(steps)) / 60  # those before an interruption too
    return record | {"minutes": round(minutes, 2), "commit": commit(), "words": words}


def sentences_name(piece: Piece) -> str:
    return "_".join(piece.folder.parts) + ".json"


def training_figures(folder: Path) -> dict[str, float | None]:
    """Returns the last evaluation, the mean loss of the last tenth of the steps and the largest gradient norm.

    The first tenth does not count for the norm: gradients of a new model are large.
    """
    summary = json.loads((folder / "summary.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tenth = max(1, len(steps) // 10)
    losses, norms = ([step[name] for step in steps] for name in ("loss", "grad_norm"))
    found = {name: value for name, value in summary["evaluation"].items() if "/" not in name}
    found["loss_end"] = None if None in losses[-tenth:] else fmean(losses[-tenth:])
    found["grad_norm_max"] = None if None in norms else max(norms[tenth:], default=None)
    return found | {"parameters": summary["parameters"], "skipped_updates": summary["skipped_updates"]}


def _filled(word: str, piece: Piece, runs: Path) -> str:
    """Replaces RUN(variant) and FOLDER(digits) by paths; writes the digits as image files."""
    word = re.sub(r"RUN\(.*\)", lambda found: str(runs / piece.source.folder) if piece.source else "", word)
    return re.sub(r"FOLDER\((\w+)\)", lambda found: str(digit_folder(runs / "digits" / found[1], found[1])), word)


def digit_folder(folder: Path, part: str) -> Path:
    """Writes some classes of the digits as PNG files, train/CLASS and val/CLASS; returns the folder."""
    from PIL import Image

    classes, most = DIGITS[part]
    with np.load(ROOT / "data" / "images" / "digits.npz") as stored:
        images, labels = stored["images"], stored["labels"]
    seen = dict.fromkeys(classes, 0)
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        split = "train" if number < TRAINING_IMAGES else "val"
        if label not in seen or (split == "train" and seen[label] == most):
            continue
        seen[label] += split == "train"
        target = folder / split / str(label) / f"{number:04}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((image * (255 / WHITE)).round().astype("uint8"))
        picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR).convert("RGB").save(target)
    return folder


def commit() -> str:
    """Returns the commit that the clone is at, with a + if it has been changed."""

    def git(words: Sequence[str]) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git(["status", "--porcelain", "--untracked-files=no", ":!docs"])
    return git(["rev-parse", "--short=7", "HEAD"]) + ("+" if changed else "")
