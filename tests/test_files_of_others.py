"""Tests that no other user's file is written through a name in a run or a cache; damaged files are made anew."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_model import WORDS

from gpipe_cli.commands import eval as evaluate
from gpipe_cli.commands import plan, train
from gpipe_cli.data.cldr.corpus import CorpusParameters, open_store

RUN = [*WORDS, "pipeline.K=1", "trainer.steps=1", "launch.inline=true", "logging.tensorboard=false"]
REFUSED = ("run.lock", "metrics.jsonl", "evaluations.jsonl")  # files that are appended to
CORPUS = CorpusParameters(("de", "yrl"), largest=300, smallest=100, vocabulary=400, seed=0)


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "mine"
    file.write_text("mine\n")
    yield file
    assert file.read_text() == "mine\n"


def files_of(folder: Path) -> list[Path]:
    """Returns the files of a folder but for checkpoints, with the drafts of earlier releases."""
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    names = [path for path in found if path.parts[0] != "checkpoints"]
    return [*names, *(path.with_name(f".partial-{path.name}") for path in names)]


def test_links_in_the_place_of_a_runs_files_are_not_written_through(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*RUN, f"hydra.run.dir={tmp_path / 'first'}"]) == 0
    names = [path for path in files_of(tmp_path / "first") if path.name not in REFUSED]
    assert {"train.log", "summary.json", "report.html"} <= {path.name for path in names}
    for name in (*names, *map(Path, REFUSED)):
        place = tmp_path / ("all" if name in names else name.name) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(mine)
    assert train.main([*RUN, f"hydra.run.dir={tmp_path / 'all'}"]) == 0
    for name in REFUSED:
        assert train.main([*RUN, f"hydra.run.dir={tmp_path / name}"]) == 1
        assert f"{name} cannot be written: Too many levels of symbolic links" in capsys.readouterr().err


def test_links_in_a_shared_cache_are_not_written_through(tmp_path: Path, mine: Path) -> None:
    open_store(CORPUS, str(tmp_path / "first"), print)
    (store,) = (path for path in (tmp_path / "first").iterdir() if path.is_dir())
    cache = tmp_path / "cache"
    for name in files_of(store):
        link = cache / f".partial-{store.name}" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(mine)
    made = open_store(CORPUS, str(cache), print)
    assert made.fingerprint() == open_store(CORPUS, str(tmp_path / "first"), print).fingerprint()
    assert not any(path.is_symlink() for path in made.folder.rglob("*"))


def test_devices_and_pipes_keep_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for page in (tmp_path / "pipe", tmp_path / "link"):
        assert plan.main(["debug=tiny", f"plan.page={page}"]) == 1
        assert "cannot be written: it is no regular file" in capsys.readouterr().err
        assert page.exists() and not page.is_file()


@pytest.mark.parametrize("link", [True, False])
def test_a_lock_that_is_a_link_or_a_pipe_is_refused(link: bool, tmp_path: Path, mine: Path) -> None:
    name = f".{CORPUS.folder()}.lock"
    if link:
        (tmp_path / name).symlink_to(mine)
    else:
        os.mkfifo(tmp_path / name)
    with pytest.raises(Exception, match=r"\.lock cannot be written: (Too many levels|it is no regular file)"):
        open_store(CORPUS, str(tmp_path), print)


@pytest.mark.parametrize("name", ["store.json", "defects.json"])
@pytest.mark.parametrize("content", ["", "[]", '{"block": [], "languages": {}}', '{"counts": {"fr": [1]}}', "[" * 9999])
def test_a_damaged_corpus_is_made_anew(content: str, name: str, tmp_path: Path) -> None:
    whole = open_store(CORPUS, str(tmp_path), print)
    before = whole.fingerprint()
    (whole.folder / name).write_text(content)
    said = list[str]()
    assert open_store(CORPUS, str(tmp_path), lambda text, *_: said.append(text)).fingerprint() == before
    assert f"{name} is damaged" in said[0]


@pytest.mark.parametrize("content", ["", "[]", "{}", '[{"name": "flatten", "parameters": [], "seconds": {}}]', "NaN"])
def test_a_damaged_profile_is_measured_anew(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_CACHE", str(tmp_path / "cache"))
    words = [*RUN, "pipeline.K=2", "pipeline.workers=1"]
    assert train.main([*words, f"hydra.run.dir={tmp_path / 'one'}"]) == 0
    (profile,) = (tmp_path / "cache" / "profiles").glob("*.json")
    profile.write_text(content)
    assert train.main([*words, f"hydra.run.dir={tmp_path / 'two'}"]) == 0
    assert len(json.loads(profile.read_text())) == 4


def test_files_that_only_a_checkpoint_names_are_not_read(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "book.txt").write_text("\n\n".join(f"the {number} words of a book" for number in range(400)))
    run, cache = tmp_path / "run", tmp_path / "run" / "cache"
    words = ["debug=tiny", "model=transformer_lm", "model.L=1", "data=text", f"data.root={text}", "data.vocabulary=30"]
    words += ["data.held_out=0.2", f"data.cache_dir={cache}", f"hydra.run.dir={run}", "trainer.steps=1"]
    assert train.main([*words, "launch.inline=true", "trainer.evaluate_every=null", "pipeline.K=1"]) == 0
    for lock in cache.glob(".*.lock"):
        lock.unlink()
        lock.symlink_to(mine)
    inline = ["launch.inline=true", "pipeline.workers=1"]
    capsys.readouterr()
    assert evaluate.main([str(run), *inline]) == 2
    said = capsys.readouterr().err
    assert "type these words, or trust=[data.root]" in said and f'data.root="{text}"' in said
    assert evaluate.main([str(run), *inline, "trust=[data.root]"]) == 0
    assert evaluate.main([str(run), *inline, f"data.root={text}"]) == 0
    (run / "evaluations" / "step_00000001_dev").rename(tmp_path / "elsewhere")
    (run / "evaluations" / "step_00000001_dev").symlink_to(tmp_path / "elsewhere")
    assert evaluate.main([str(run), *inline, f"data.root={text}"]) == 2
    assert "is a link to another place: name one by output=DIR" in capsys.readouterr().err
