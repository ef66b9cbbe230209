"""Tests that a run goes on with the data that it began with, or says that they have changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import parallel_folder
import pytest
import tiny_images
from inline_run import train_inline

from gpipe_cli.checkpoint.choose import find
from gpipe_cli.checkpoint.compatibility import (
    require_known_ids,
    require_own_vocabularies,
    require_same_data,
    vocabularies,
)
from gpipe_cli.checkpoint.files import CheckpointInfo, RunState
from gpipe_cli.data.images.source import ImageSource
from gpipe_cli.data.parallel.source import ParallelTextSource
from gpipe_cli.data.source import no_report
from gpipe_cli.errors import ConfigurationError


class Known:
    """Has a given fingerprint and vocabulary, as a data source."""

    def __init__(self, fingerprint: str, vocabulary: bytes = b"a b c") -> None:
        self._fingerprint, self._vocabulary = fingerprint, vocabulary

    def fingerprint(self) -> str:
        return self._fingerprint

    def keep_vocabularies(self, folder: Path) -> None:
        (folder / "source.model").write_bytes(self._vocabulary)


@pytest.fixture
def saved(tmp_path: Path) -> CheckpointInfo:
    """Makes the checkpoint of a run with `Known("one")`."""
    vocabularies = tmp_path / "vocabulary"
    vocabularies.mkdir()
    source = Known("one")
    source.keep_vocabularies(vocabularies)
    return CheckpointInfo(tmp_path / "checkpoints" / "step_00000001", 1, RunState(data_fingerprint="one"), {}, {})


def refusal(info: CheckpointInfo, source: Any, allow_changes: list[str]) -> str:
    with pytest.raises(ConfigurationError) as error:
        require_same_data(info, source, allow_changes)
    return str(error.value)


def edit(path: Path) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]} {lines[1]} xylophone", *lines[1:]]) + "\n")


# --- what is refused


def test_the_same_data_are_gone_on_with(saved: CheckpointInfo) -> None:
    require_same_data(saved, Known("one"), [])  # type: ignore[arg-type]


def test_other_data_are_refused_with_what_to_do(saved: CheckpointInfo) -> None:
    said = refusal(saved, Known("two"), ["seed"])
    assert f"{saved.path} was trained on other data" in said and "the data have changed since the run began" in said
    assert f"checkpoint.init_from={saved.path.parent.parent} " in said
    assert "type: 'checkpoint.allow_changes=[seed,data]'" in said


def test_other_data_may_be_insisted_on(saved: CheckpointInfo) -> None:
    require_same_data(saved, Known("two"), ["data"])  # type: ignore[arg-type]


def test_another_vocabulary_is_named_and_not_to_be_insisted_on(saved: CheckpointInfo) -> None:
    said = refusal(saved, Known("one", b"a c b"), ["data"])
    assert str(saved.path.parent.parent / "vocabulary" / "source.model") in said
    assert "the data have changed since the run began" in said and "allow_changes" not in said


def test_a_checkpoint_that_knows_nothing_of_its_data_is_gone_on_from(tmp_path: Path) -> None:
    require_same_data(CheckpointInfo(tmp_path / "c" / "step_00000001", 1, RunState(), {}, {}), Known("two"), [])  # type: ignore[arg-type]


def test_a_digest_in_the_checkpoint_counts_more_than_the_file_beside_it(saved: CheckpointInfo) -> None:
    info = replace(saved, state=RunState(vocabularies=vocabularies(Known("one", b"a c b"))))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"vocabulary/source\.model is not the vocabulary"):
        require_own_vocabularies(info)
    with pytest.raises(ConfigurationError, match=r"another vocabulary \(source\.model\) than"):
        require_known_ids(info, Known("one"))  # type: ignore[arg-type]
    require_known_ids(info, Known("two", b"a c b"))  # type: ignore[arg-type]


# --- runs


def test_a_run_whose_text_was_edited_does_not_go_on(tmp_path: Path) -> None:
    root, run_dir = parallel_folder.plain(tmp_path / "text"), tmp_path / "run"
    data = ("data=parallel_text", f"data.root={root}", f"data.cache_dir={tmp_path}")
    words = ("debug=tiny", *data, "trainer.evaluate_every=null", "trainer.evaluate_first=false", "task.generation=null")
    train_inline(run_dir, *words, "trainer.steps=1")
    kept = (run_dir / "vocabulary" / "source.model").read_bytes()
    edit(root / "train.de")
    with pytest.raises(ConfigurationError, match=r"vocabulary/source\.model is another vocabulary"):
        train_inline(run_dir, *words, "trainer.steps=2", f"checkpoint.resume={find(run_dir)[0].path}")
    assert (run_dir / "vocabulary" / "source.model").read_bytes() == kept


@pytest.mark.slow
def test_a_run_goes_on_with_the_fingerprint_that_its_checkpoint_has(tmp_path: Path) -> None:
    words = ("debug=tiny", "trainer.evaluate_every=null", "trainer.evaluate_first=false", "task.generation=null")
    train_inline(tmp_path, *words, "trainer.steps=1")
    info = find(tmp_path)[0]
    assert info.state.data_fingerprint
    resume = f"checkpoint.resume={info.path}"
    assert train_inline(tmp_path, *words, "trainer.steps=2", resume)[0]["steps"] == 2


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
    source = ImageSource("image_folder", tiny_images.CLASSES, str(root), batch_size=2, cache_dir=str(root / "cache"))
    source.prepare(no_report)
    return source.fingerprint()


def test_images_have_another_fingerprint_when_one_is_added(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for root in (here, there):
        tiny_images.image_folder(root)
    assert pictures(there) == pictures(here)
    tiny_images.save_image(there / "train" / "n00000001" / "new.png", 1)
    assert pictures(there) != pictures(here)
