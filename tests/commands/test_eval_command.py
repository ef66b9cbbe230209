"""Tests gpipe-eval and gpipe-export: a checkpoint gives what its run found at any K; runs compared, weights written."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoint_tools import OPTIMIZERS, changed, make_layers, parameters_of, save, train
from inline_run import train_inline
from processes import command, succeeded
from safetensors.torch import load_file
from torch import nn

from gpipe_cli.commands import export
from gpipe_cli.commands import report as gather
from gpipe_cli.commands.eval import as_text, main
from gpipe_cli.tasks.translation import TranslationTask

INLINE = ("launch.inline=true", "pipeline.workers=1", "trainer.samples=0")
TRANSLATION = ("debug=tiny", "trainer.steps=2", "trainer.evaluate_every=null", "task.generation.beam=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Trains a tiny translation run; returns it and its last evaluation."""
    folder = tmp_path_factory.mktemp("run")
    summary, _ = train_inline(folder, *TRANSLATION)
    return folder, summary["evaluation"]


def evaluated(folder: Path, *words: str) -> dict[str, Any]:
    """Returns the report of gpipe-eval."""
    output = folder / "again"
    assert main([f"checkpoint={folder}", f"output={output}", *INLINE, *words]) == 0
    return dict(json.loads((output / "evaluation.json").read_text()))


# -- evaluating ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 7])
def test_a_checkpoint_gives_what_its_run_found_at_any_K(run: tuple[Path, dict[str, float]], K: int) -> None:
    folder, found = run
    report = evaluated(folder, f"pipeline.K={K}")
    assert report["numbers"] == found
    assert (report["step"], report["K"], report["beam"], report["split"]) == (2, K, 2, "dev")


def test_the_report_and_the_translations_that_were_scored_stand_in_the_run(run: tuple[Path, dict[str, float]]) -> None:
    folder, found = run
    made = folder / "evaluations" / "step_00000002_dev"
    (made / "translations").mkdir(parents=True)
    (made / "translations" / "tlh.txt").write_text("of an earlier evaluation, with another language")
    assert main([f"checkpoint={folder}", *INLINE]) == 0
    assert {"evaluation.json", "translations"} <= {path.name for path in made.iterdir()}
    files = {path.stem: path for path in (made / "translations").iterdir()}
    assert {f"bleu/{code}" for code in files} == {name for name in found if name.startswith("bleu/")}
    for code, path in files.items():
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]
        assert {len(row) for row in rows} == {3}
        bleu = TranslationTask().score([row[2] for row in rows], [row[1] for row in rows])["bleu"]
        assert bleu == pytest.approx(found[f"bleu/{code}"])


def test_languages_that_count_in_no_mean_are_marked_and_the_threshold_is_said() -> None:
    numbers = {"bleu/de": 20.0, "bleu/fy": 38.0, "languages_with_few_sentences": 1.0}
    report = {"numbers": numbers, "sizes": {"de": 900, "fy": 9}, "sentences": {"fy": 4, "de": 70}, "name": "run"}
    lines = as_text({**report, "parameters": 9, "signature": None, "fewest_sentences": 50})
    assert re.search(r"(?m)^fy\* ", "\n".join(lines)), lines
    assert lines[-1] == "* in no mean: below task.generation.fewest_sentences=50"


def test_a_language_model_with_averaged_weights(tmp_path: Path) -> None:
    words = ("debug=tiny", "model=transformer_lm", "data=cldr_text", "task=language_model", "trainer.average=0.5")
    summary, _ = train_inline(tmp_path, *words, "trainer.steps=3", "trainer.evaluate_every=null")
    report = evaluated(tmp_path)
    assert report["numbers"] == summary["evaluation"] and "perplexity" in report["numbers"]
    assert report["averaged_weights"]


def test_it_is_refused_under_torchrun(
    run: tuple[Path, dict[str, float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main([f"checkpoint={run[0]}"]) == 2
    assert "gpipe-eval: it starts its own workers: call it without torchrun" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", ["pipeline.K=4 pipeline.workers=2", "pipeline.K=2 pipeline.replicas=2"])
def test_real_workers_find_the_same(words: str, run: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    folder, found = run
    said = succeeded(command("eval", f"checkpoint={folder}", f"output={tmp_path}", *words.split()))
    assert json.loads((tmp_path / "evaluation.json").read_text())["numbers"] == found
    assert "bleu_average" in said and "sw" in said


# -- comparing -----------------------------------------------------------------------------------------------------

SIZES = {"de": 1000, "ru": 200, "sw": 10}


def report(folder: Path, run: str, parameters: int, bleu: dict[str, float], **changes: Any) -> str:
    """Makes an evaluated run; returns its directory."""
    levels = dict(zip(("bleu_high", "bleu_middle", "bleu_low"), bleu.values(), strict=False)) if len(bleu) > 1 else {}
    numbers = {"bleu": 1.0, **levels, **{f"bleu/{code}": value for code, value in bleu.items()}}
    values = {"name": run, "parameters": parameters, "numbers": numbers, "split": "test", "beam": 8, "signature": "s"}
    more = {"sizes": {code: SIZES[code] for code in bleu}}
    place = folder / run / "evaluations" / "step_00000001_test"
    place.mkdir(parents=True)
    (place / "evaluation.json").write_text(json.dumps({**values, **more, **changes}))
    return str(folder / run)


def test_runs_are_compared_by_resource_and_with_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = report(tmp_path, "narrow", 100, {"de": 30.0, "ru": 20.0, "sw": 10.0})
    deep = report(tmp_path, "deep", 300, {"de": 33.0, "ru": 25.0, "sw": 18.0})
    report(tmp_path / "sweep", "0_sw", 80, {"sw": 12.5})
    report(tmp_path / "sweep", "1_de", 80, {"de": 40.0})
    single = tmp_path / "sweep"
    words = [f"compare=[{narrow},{deep}]", f"baseline={single}", f"output={tmp_path / 'out'}"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "figure narrow deep" in said and "parameters 100 300" in said and "bleu_low 10 18" in said
    assert "de 1,000 40.0 -10.0 -7.0" in said and "sw 10 12.5 -2.5 +5.5" in said
    assert (tmp_path / "out" / "report.html").read_text().count("<svg") == 2


def test_what_was_counted_otherwise_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"de": 30.0, "ru": 20.0, "sw": 10.0}
    one, other = report(tmp_path, "one", 1, scores), report(tmp_path, "other", 1, scores, beam=1)
    assert main([f"compare=[{one},{other}]"]) == 2
    assert "the evaluations differ in beam" in capsys.readouterr().err


# -- gpipe-export ----------------------------------------------------------------------------------------------------


def test_a_run_is_exported_into_its_directory_and_loads_into_the_plain_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {name.replace("/", "_"): layer for name, layer in make_layers().items()}
    optimizer = OPTIMIZERS["Adam"](parameters_of(layers))
    train(layers, optimizer, range(2))
    save(tmp_path / "run", 2, layers, optimizer)
    assert export.main([str(tmp_path / "run")]) == 0
    assert "10 tensors of 4 layers" in capsys.readouterr().out
    plain = nn.ModuleDict({name.replace("/", "_"): layer for name, layer in make_layers(seed=1).items()})
    plain.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert not changed(plain.state_dict(), nn.ModuleDict(layers).state_dict())


def test_export_takes_the_step_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = make_layers()
    save(tmp_path, 1, layers, best=1)
    save(tmp_path, 2, layers, best=1)
    for step, wanted in (("best", 1), ("last", 2), ("1", 1)):
        target = tmp_path / f"{step}.safetensors"
        assert export.main([f"checkpoint={tmp_path}", f"output={target}", f"step={step}"]) == 0
        assert f"from step {wanted} of" in capsys.readouterr().out
    assert export.main([f"checkpoint={tmp_path}", f"output={tmp_path / 'x.safetensors'}", "step=7"]) == 2
    assert "it has kept: 1, 2" in capsys.readouterr().err


def test_an_existing_output_is_replaced_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, make_layers())
    output = tmp_path / "model.safetensors"
    output.write_text("mine")
    words = [f"checkpoint={tmp_path}", f"output={output}"]
    assert export.main(words) == 2
    assert "overwrite=true" in capsys.readouterr().err and output.read_text() == "mine"
    assert export.main([*words, "overwrite=true"]) == 0


@pytest.mark.parametrize("place", ["file/x", "/proc/x", "above/" + "a" * 300])
def test_an_output_where_nothing_can_be_written_is_refused(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    save(tmp_path / "run", 1, make_layers())
    (tmp_path / "run" / "summary.json").write_text("{}")
    for name, call in (("export", export.main), ("report", gather.main)):
        assert call(["run", f"output={place}/x.safetensors" if name == "export" else f"output={place}"]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"gpipe-{name}: output={place}") and (said.err.count("\n"), said.out) == (1, "")
