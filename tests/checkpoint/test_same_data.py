"""Tests that a run goes on with the data that it began with, or says that they have changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import parallel_folder
import pytest
import tiny_images
from inline_run import train_inline

from gpipe_cli.checkpoint.compatibility import require_same_data, vocabularies
from gpipe_cli.checkpoint.files import CheckpointInfo, RunState, find
from gpipe_cli.data.images.source import ImageSource
from gpipe_cli.data.parallel.source import ParallelTextSource
from gpipe_cli.data.source import Batch, Source, no_report
from gpipe_cli.errors import ConfigurationError


class Known(Source):
    """Has a given fingerprint and vocabulary, as a data source."""

    def __init__(self, fingerprint: str, vocabulary: bytes = b"a b c") -> None:
        self._fingerprint, self._vocabulary = fingerprint, vocabulary

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        return iter(())

    def evaluation(self, M: int) -> Iterator[Batch]:
        return iter(())

    def fingerprint(self) -> str:
        return self._fingerprint

    def keep_vocabularies(self, folder: Path) -> None:
        (folder / "source.model").write_bytes(self._vocabulary)


@pytest.fixture
def saved(tmp_path: Path) -> CheckpointInfo:
    """Makes the checkpoint of a run with `Known("one")`."""
    state = RunState(data_fingerprint="one", vocabularies=vocabularies(Known("one")))
    return CheckpointInfo(tmp_path / "checkpoints" / "step_00000001", 1, state, {}, {})


def refusal(info: CheckpointInfo, source: Any, allow_changes: list[str]) -> str:
    with pytest.raises(ConfigurationError) as error:
        require_same_data(info, source, allow_changes)
    return str(error.value)


def edit(path: Path) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]} {lines[1]} xylophone", *lines[1:]]) + "\n")


def test_other_data_are_refused_with_what_to_do_and_may_be_insisted_on(saved: CheckpointInfo) -> None:
    same, other = Known("one"), Known("two")
    require_same_data(saved, same, [])  # type: ignore[arg-type]
    said = refusal(saved, other, ["seed"])
    assert f"{saved.path} was trained on other data" in said and f"checkpoint.init_from={saved.run_dir}\n" in said
    assert "type: 'checkpoint.allow_changes=[seed,data]'" in said
    require_same_data(saved, other, ["data"])  # type: ignore[arg-type]
    require_same_data(replace(saved, state=RunState()), other, [])  # type: ignore[arg-type]


def test_another_vocabulary_is_named_and_not_to_be_insisted_on(saved: CheckpointInfo) -> None:
    said = refusal(saved, Known("one", b"a c b"), ["data"])
    assert "source.model is another vocabulary" in said and "allow_changes" not in said


def test_a_run_whose_text_was_edited_does_not_go_on(tmp_path: Path) -> None:
    root, run_dir = parallel_folder.plain(tmp_path / "text"), tmp_path / "run"
    data = ("data=parallel_text", f"data.root={root}", f"data.cache_dir={tmp_path}")
    words = ("debug=tiny", *data, "trainer.evaluate_every=null", "trainer.evaluate_first=false", "task.generation=null")
    train_inline(run_dir, *words, "trainer.steps=1")
    kept = (run_dir / "vocabulary" / "source.model").read_bytes()
    edit(root / "train.de")
    with pytest.raises(ConfigurationError, match=r"source\.model is another vocabulary"):
        train_inline(run_dir, *words, "trainer.steps=2", f"checkpoint.resume={find(run_dir)[0].path}")
    assert (run_dir / "vocabulary" / "source.model").read_bytes() == kept


def test_a_run_goes_on_with_its_text_named_otherwise(tmp_path: Path) -> None:
    root, run_dir = parallel_folder.plain(tmp_path / "text"), tmp_path / "run"
    words = ["debug=tiny", "data=parallel_text", f"data.cache_dir={tmp_path}", "task.generation=null"]
    words += ["trainer.evaluate_every=null", "trainer.evaluate_first=false"]
    older = "~data.strict"  # a run from before there was the key
    train_inline(run_dir, *words, older, f"data.root={root}", "trainer.steps=1")
    files = {"train": "train", "dev": "valid", "test": "test"}
    words += [f"data.{split}={{de: {root}/{name}.de}}" for split, name in files.items()]
    words.append(f"checkpoint.resume={find(run_dir)[0].path}")
    assert train_inline(run_dir, *words, "data.strict=true", "trainer.steps=2")[0]["steps"] == 2


# --- fingerprints


def text(root: Path, cache: Path) -> str:
    source = ParallelTextSource(str(root), source_vocabulary=300, target_vocabulary=300, cache_dir=str(cache))
    source.prepare(no_report)
    return source.fingerprint()


def test_text_has_the_same_fingerprint_wherever_it_lies_until_it_is_edited(tmp_path: Path) -> None:
    here, there = (parallel_folder.plain(tmp_path / name) for name in ("here", "there"))
    first = text(here, tmp_path / "cache")
    assert text(there, tmp_path / "elsewhere") == first
    edit(there / "train.de")
    assert text(there, tmp_path / "elsewhere") != first


def pictures(root: Path) -> str:
    source = ImageSource("image_folder", tiny_images.CLASSES, str(root), batch_size=2)
    source.prepare(no_report)
    return source.fingerprint()


def test_images_have_another_fingerprint_when_one_is_added(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for root in (here, there):
        tiny_images.image_folder(root)
    assert pictures(there) == pictures(here)
    tiny_images.save_image(there / "train" / "n00000001" / "new.png", 1)
    assert pictures(there) != pictures(here)
