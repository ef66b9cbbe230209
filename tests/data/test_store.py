"""Tests the store against its text, and a preparation that is killed and continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import parallel_folder
import preparation_jobs
import pytest
from run_files import bytes_of

from gpipe_cli.data.source import no_report
from gpipe_cli.data.store import LanguageSummary, Sizes, Store, interleave, write_description, write_shard


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parallel_folder.opus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def store(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return preparation_jobs.prepare(root, tmp_path_factory.mktemp("cache"), 1, no_report)


def pairs_of(store: Store, code: str) -> list[tuple[str, str]]:
    """Returns the decoded pairs, in the order of the disk."""
    count, number = store.sizes[code], [*store.languages].index(code)
    sides = store.gather(store.locate(np.full(count, number), np.arange(count)))
    vocabularies = store.source_vocabulary, store.target_vocabulary
    texts = [
        [vocabulary.decode(of.tolist()) for of in np.split(ids, np.cumsum(lengths)[:-1])]
        for (ids, lengths), vocabulary in zip(sides, vocabularies, strict=True)
    ]
    return list(zip(*texts, strict=True))


def test_the_pairs_lie_shuffled(store: Store) -> None:
    text = [pair.target for pair in parallel_folder.pairs_of("de", 300)]
    places = [text.index(target) for _, target in pairs_of(store, "de") if target in text]
    assert len(places) > 200
    assert abs(np.corrcoef(places, np.arange(len(places)))[0, 1]) < 0.2


@pytest.mark.parametrize(
    ("text", "done"),
    [
        pytest.param("counting lines", 4, marks=pytest.mark.slow),
        pytest.param("target vocabulary", 0, marks=pytest.mark.slow),
        ("token ids", 400),
        pytest.param("shards", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_preparation_goes_on_to_the_same_bytes(
    text: str, done: int, root: Path, store: Store, tmp_path: Path
) -> None:
    words = [sys.executable, preparation_jobs.__file__, str(root), str(tmp_path), "2", text, str(done)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGKILL)
    (left,) = tmp_path.glob(".partial-*")
    _wait_for_the_end_of_group(process.pid)
    before = {path: path.stat().st_mtime_ns for path in (*left.rglob("*.json"), *left.glob("*.model"))}
    done_again: list[Path] = []

    def look(*_: object) -> None:
        done_again.extend(path for path in before if path.exists() and path.stat().st_mtime_ns != before[path])

    made = preparation_jobs.prepare(root, tmp_path, 1, look)
    assert bytes_of(made.folder) == bytes_of(store.folder)
    assert before and not left.exists() and not done_again


def _wait_for_the_end_of_group(group: int) -> None:
    """Waits until the killed process' own processes have ended."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the processes of a killed preparation live on")


def test_a_store_is_made_again_only_when_a_file_has_changed(tmp_path: Path) -> None:
    root, reports = parallel_folder.opus(tmp_path / "text"), list[str]()
    first = preparation_jobs.prepare(root, tmp_path / "cache", 1, no_report)
    preparation_jobs.prepare(root, tmp_path / "cache", 1, lambda text, *_: reports.append(text))
    assert reports == []
    parallel_folder.write(root / "sw-en" / "opus.sw-en-dev.sw", ["x"] * 20)
    assert preparation_jobs.prepare(root, tmp_path / "cache", 1, no_report).folder != first.folder


def test_ids_over_two_bytes_are_stored_in_four(tmp_path: Path, store: Store) -> None:
    tokens, lengths = interleave([[1, 70_000], [2]], [[3], [4, 65_536]], wide=True)
    assert (tokens.dtype, tokens.tolist()) == (np.uint32, [1, 70_000, 3, 2, 4, 65_536])
    assert lengths.tolist() == [[2, 1], [1, 2]]
    write_shard(tmp_path, "de", 0, tokens, lengths, Sizes().block)
    write_description(tmp_path, {"de": LanguageSummary.of_shard(lengths)}, Sizes().block, {})
    (tmp_path / "source.model").write_bytes((store.folder / "source.model").read_bytes())
    wide = Store(tmp_path)
    rows = wide.locate(np.array([0, 0]), np.array([1, 0]))
    assert [side[0].tolist() for side in wide.gather(rows)] == [[2, 1, 70_000], [4, 65_536, 3]]
