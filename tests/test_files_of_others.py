"""Tests that anybody's run or cache calls, reads and writes nothing but what is ours or named; damage is mended."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from inline_run import train_inline
from own_model import WORDS

from gpipe_cli.commands import eval as evaluate
from gpipe_cli.commands import plan, train, translate
from gpipe_cli.data.cldr.source import CorpusParameters, open_store
from gpipe_cli.data.source import no_report
from gpipe_cli.errors import ConfigurationError, PlainError
from gpipe_cli.jobs.trust import OURS, SECTIONS

RUN = [*WORDS, "pipeline.K=1", "trainer.steps=1", "launch.inline=true", "logging.tensorboard=false"]
INLINE = ("launch.inline=true", "pipeline.workers=1")
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


def test_links_in_a_run_are_not_written_through(tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path, mine: Path) -> None:
    (tmp_path / f".{CORPUS.folder()}.lock").symlink_to(mine)
    with pytest.raises(Exception, match=r"\.lock cannot be written: Too many levels"):
        open_store(CORPUS, str(tmp_path), print)


@pytest.mark.parametrize("place", ["mine/x", "/proc/x", "a" * 300])
def test_a_cache_where_nothing_can_be_made_is_refused(place: str, mine: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be written: .*: set data.cache_dir or GPIPE_CACHE to"):
        open_store(CORPUS, str(mine.parent / place), no_report)


def test_the_words_of_a_run_bring_in_no_files_of_its_own(tmp_path: Path) -> None:
    for folder in (".hydra", "model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "theirs.yaml").write_text("_target_: os.abort\n")
    (tmp_path / ".hydra" / "overrides.yaml").write_text(f"['hydra.searchpath=[file://{tmp_path}]', model=theirs]")
    with pytest.raises(ConfigurationError, match="there is no model=theirs"):
        plan.advise(str(tmp_path), [])


def test_a_cache_that_is_deleted_while_it_is_used_is_told(tmp_path: Path) -> None:
    corpus = open_store(CORPUS, str(tmp_path), no_report)
    shutil.rmtree(corpus.folder)
    with pytest.raises(PlainError, match=r"held_out\.jsonl was there and has been deleted: continue the run"):
        list(corpus.held_out("dev"))


@pytest.mark.parametrize("content", ["", "{", '{"layers": [["flatten", [], {}]], "loss": null}'])
def test_a_damaged_profile_is_measured_anew(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_CACHE", str(tmp_path / "cache"))
    words = [*RUN, "pipeline.K=2", "pipeline.workers=1"]
    assert train.main([*words, f"hydra.run.dir={tmp_path / 'one'}"]) == 0
    (profile,) = (tmp_path / "cache" / "profiles").glob("*.json")
    huge = re.sub('"forward": [^,]*', '"forward": 1e308', profile.read_text())
    profile.write_text(content or huge)  # whole, but of times that no layer takes
    assert train.main([*words, f"hydra.run.dir={tmp_path / 'two'}"]) == 0
    assert len(json.loads(profile.read_text())["layers"]) == 4


def test_files_a_checkpoint_names_are_not_read(tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert evaluate.main([str(run), *INLINE]) == 0, "the run's own record names them"
    record = run / ".hydra" / "config.yaml"
    record.write_text(record.read_text().replace(str(text), "/another/text"))
    capsys.readouterr()
    assert evaluate.main([str(run), *INLINE]) == 2
    said = capsys.readouterr().err
    assert "type these words, or trust=[data.root]" in said and f'data.root="{text}"' in said
    assert evaluate.main([str(run), *INLINE, "trust=[data.root]"]) == 0
    assert evaluate.main([str(run), *INLINE, f"data.root={text}"]) == 0
    (run / "evaluations" / "step_00000001_dev").rename(tmp_path / "elsewhere")
    (run / "evaluations" / "step_00000001_dev").symlink_to(tmp_path / "elsewhere")
    assert evaluate.main([str(run), *INLINE, f"data.root={text}"]) == 2
    assert "is a link to another place: name one by output=DIR" in capsys.readouterr().err


# -- calls -----------------------------------------------------------------------------------------------------------


CONF = Path(__file__).parents[1] / "conf"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run of a user's own model."""
    folder = tmp_path_factory.mktemp("run")
    train_inline(folder, *WORDS, "++model.middle=Tanh", "trainer.steps=1")
    return folder


def with_configuration(run: Path, folder: Path, changes: Mapping[str, Any]) -> Path:
    """Copies the run and changes its manifest, by dotted keys; the model is one of ours."""
    copy = folder / "copy"
    shutil.copytree(run, copy)
    (manifest,) = copy.glob("checkpoints/*/manifest.json")
    said = json.loads(manifest.read_text())
    ours = {"model._target_": "gpipe_cli.models.amoebanet.amoebanet"}
    for key, value in {**ours, **changes}.items():
        section = said["state"]["configuration"]
        *above, last = key.split(".")
        for name in above:
            section = section[name]
        section[last] = value
    manifest.write_text(json.dumps(said))
    return copy


@pytest.mark.parametrize(
    ("command", "key"),
    [(translate.main, "model"), *((evaluate.main, key) for key in ("model", "data", "task", "task.x", "data.list"))],
)
def test_a_function_named_in_a_manifest_is_not_called(
    command: Any, key: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "copied"
    call = {"_target_": "shutil.copy", "src": __file__, "dst": str(copied)}
    changed = with_configuration(run, tmp_path, {key: [[call]] if key == "data.list" else call})
    assert command([f"checkpoint={changed}", *INLINE]) == 2
    said = capsys.readouterr().err
    assert "wants to call shutil.copy" in said and "type trust=[shutil.copy]" in said
    assert not copied.exists()


HIDDEN = "gpipe_cli.data.images.digits.Path.unlink"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task._target_": HIDDEN}, f"wants to call {HIDDEN}"),
        ({"pipeline.M": "auto", "model._target_": "os.abort"}, "wants to call os.abort"),
        ({"data.x": r"\${oc.decode:'{_target_: os.abort}'}"}, "no run writes ${…} there"),
    ],
)
def test_a_manifest_cannot_hide_what_it_wants_to_call(
    changes: dict[str, Any], message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = with_configuration(run, tmp_path, changes)
    assert evaluate.main([f"checkpoint={changed}", *INLINE]) == 2
    assert message in capsys.readouterr().err


REFUSED_VALUES = {"pipeline.K": 0, "model.L": 10**8, "model.D": 1, "pipeline.M": "abc"}


@pytest.mark.parametrize("key", REFUSED_VALUES)
def test_a_refused_configuration_is_told_with_its_manifest(
    key: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = with_configuration(run, tmp_path, {key: REFUSED_VALUES[key]})
    resume = [*RUN, "pipeline.M=auto", "checkpoint.allow_changes=[model]", f"checkpoint.resume={changed}"]
    resume += [f"hydra.run.dir={tmp_path / 'new'}"]
    assert (train.main(resume) if key == "pipeline.M" else evaluate.main([str(changed), *INLINE])) == 2
    assert f"step_00000001/manifest.json: {key}={REFUSED_VALUES[key]}: should be" in capsys.readouterr().err
    assert evaluate.main([str(changed), *INLINE, "pipeline.schedule=sometimes"]) == 2
    assert "manifest.json: pipeline.schedule" not in capsys.readouterr().err


def test_a_run_of_ones_own_model_is_evaluated_once_it_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([f"checkpoint={run}", *INLINE]) == 2
    advice = re.search(r"type (trust=\S+)", capsys.readouterr().err)
    assert advice is not None and advice[1] == "trust=[own_model.layers]"
    assert evaluate.main([f"checkpoint={run}", *INLINE, advice[1]]) == 0
    typed = ["model._target_=own_model.layers", "model.middle=Tanh"]
    assert evaluate.main([f"checkpoint={run}", *INLINE, *typed]) == 0


def test_whatever_a_configuration_of_ours_calls_is_ours() -> None:
    files = [path for section in SECTIONS for path in (CONF / section).glob("*.yaml")]
    named = {name for path in files for name in re.findall(r"_target_: *([\w.]+)", path.read_text())}
    assert named and named <= OURS
