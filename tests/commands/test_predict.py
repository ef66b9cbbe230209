"""Tests that predictions are those of the evaluation: by class on the run's page, and of any file by gpipe-predict."""

import csv
import io
import json
from itertools import islice
from pathlib import Path

import pytest
import tiny_images
import torch
from inline_run import train_inline
from own_model import WORDS
from PIL import Image

from gpipe_cli.commands.predict import main
from gpipe_cli.jobs.page import run_page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a classifier of three colours on class folders."""
    folder = tmp_path_factory.mktemp("predict")
    tiny_images.image_folder(folder / "images")
    data = ["data=image_folder", f"data.root={folder}/images", "data.image_size=8", "data.batch_size=4"]
    words = [word for word in WORDS if not word.startswith("data")]
    train_inline(folder / "run", *words, *data, "pipeline.K=2", "pipeline.M=2", "trainer.steps=4", "optimizer.lr=0.01")
    return folder / "run"


def test_the_classes_of_an_evaluation_are_counted_and_shown(run: Path) -> None:
    report = json.loads((run / "classes.json").read_text())
    evaluated = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    right = sum(count for label, predicted, count in report["confusion"] if label == predicted)
    total = sum(count for *_, count in report["confusion"])
    assert total == len(report["predicted"]) == 6 and right / total == evaluated["accuracy"]
    assert len(report["worst"]) == total - right
    page = run_page(run).html()
    assert "most often taken for" in page and page.count("data:image/png;base64") == 1 + total - right
    with Image.open(run / "pictures" / "augmented.png") as sheet:
        assert sheet.size == (22, 22)  # two by two images of 8 pixels, framed


def test_any_file_is_classified_as_an_evaluation_does(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads((run / "classes.json").read_text())
    words = ["pipeline.K=3", "pipeline.workers=1", "trust=[own_model.layers]"]
    assert main([str(run), f"{run.parent}/images/val", *words]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    expected = [(report["names"][label], f"{probability:.4f}") for label, probability in report["predicted"]]
    assert [(row["class"], row["probability"]) for row in rows] == expected
    assert [Path(row["file"]).parent.parent.name for row in rows] == ["val"] * 6
    assert main([str(run), "nowhere.png"]) == 2 and "nowhere.png: there is no such file" in capsys.readouterr().err


def test_mixed_images_depend_on_neither_micro_batches_nor_loaders_nor_a_resume(run: Path) -> None:
    words = {"mixup": 0.2, "cutmix": 1.0, "rand_augment": 2, "random_erasing": 0.5, "batch_size": 4}

    def drawn(M: int, workers: int, position: object = None) -> list[torch.Tensor]:
        batches = tiny_images.opened(run.parent / "images", workers=workers, **words).train(position, M, 0, 1)
        parts = [part for batch in islice(batches, 2 if position is None else 1) for part in batch.micro_batches]
        return [torch.cat([of[place][0] for of in parts]) for place in (0, 1)]

    images, shares = drawn(2, 0)
    assert images.dtype == torch.uint8 and torch.allclose(shares.sum(1), torch.ones(8)) and (shares % 1 > 0).any()
    for others in (drawn(1, 0), drawn(4, 1)):
        assert all(map(torch.equal, others, (images, shares)))
    assert all(map(torch.equal, drawn(2, 0, {"epoch": 0, "batch": 1}), (images[4:], shares[4:])))
