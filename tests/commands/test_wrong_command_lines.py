"""Tests that wrong command lines are refused in one screen that names the mistake."""

import shlex
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from processes import command

from gpipe_cli.terminal.runs import read_run

SCREEN = 24  # lines
CASES = {  # command line to what the answer must contain
    "train pipeline.K=0": "pipeline.K=0: should be greater than or equal to 1",
    "train optimizer.lr=nan": "optimizer.lr=nan",
    "train precision.loss_scale=1000": "precision.loss_scale=1000 is no power of two, and would round: use 1024",
    "train pipeline.k=4": "there is no key pipeline.k; did you mean pipeline.K?",
    "train model=layers": "model=layers has another name by now: type model=custom",
    "train pipeline.devices=[{speed:1}]": "pipeline.devices has another name by now: type pipeline.worker_devices",
    "train experimnt=nmt": "there is no key experimnt; did you mean experiment?",
    "train task.generation=null task.generation.beam=4": "it is switched off; leave out task.generation=null",
    "train pipeline.K=1,2": "pipeline.K=1,2 is a sweep: give one value",
    "train --pipeline.K=4": "keys have no dashes, type pipeline.K=4",
    "train optimizer=adm": "there is no optimizer=adm; did you mean optimizer=adam",
    "train pipeline.workers=5": "use pipeline.workers<=4 or pipeline.K>=5",
    "train pipeline.K=4 pipeline.partition=[3,5]": "pipeline.partition=[3,5] has 2 numbers but pipeline.K=4",
    "train pipeline.M=128": "use data.batch_size>=128 or pipeline.M<=96",
    "train trainer.steps=null": "set one, as trainer.steps=1000",
    "train data.pair=klingon": "klingon",
    "train data.batch_size=???": "data.batch_size needs a value: type data.batch_size=…",
    "train 'logging.trackers=[{a: 1}]'": "logging.trackers=[{a:1}]",
    "train optimizer=adam optimizer.fused=maybe": "optimizer.fused=maybe: should be a valid boolean",
    "train optimizer.rest.eps=abc": "optimizer.rest.eps=abc: should be a valid number",
    f"train hydra.run.dir={'a' * 300}/run": "hydra.run.dir",
    "train checkpoint.resume=nowhere": "checkpoint.resume: nowhere holds no complete checkpoint",
    f"train checkpoint.resume={'a' * 300}": "a/manifest.json: File name too long",
    f"train data=parallel_text data.root={'a' * 300}": "data.root=",
    "train data=parallel_text data.root=": "data.root is not set: type data.root=FOLDER",  # $UNSET
    "train data.root=~/a#b": """write key=value, a text as 'data.root="~/a#b"'""",
    "train pipeline.M=1000000 data.batch_size=1000000": "a step has at most 1,048,576 forwards",
    "train --config-dir nowhere": "--config-dir nowhere: there is no such folder",
    "plan plan.best=true plan.devices=1000000000000": "plan.devices=1000000000000: should be less than or equal to",
    "report nowhere": "nowhere is not there",
    "plan plan.device=h1000": "did you mean h100",
    "eval nowhere step=²": "step=²: use a number, best or last",
    "export nowhere output=x.zip": "output=x.zip",
    "bench K=2": "which table?",
    "bench table=2 K=[0]": "K=[0]: should be greater than or equal to 2 or null",
    "train pipeline.schedule=interleaved_1f1b pipeline.workers=3": "use pipeline.K=3 or 6",
    "train pipeline.M=32 pipeline.replicas=4": "pipeline.M=32 × pipeline.replicas=4 needs 128 examples",
    "train trainer.patience=3 trainer.evaluate_every=null": "set trainer.evaluate_every too",
    "train ~trainer.steps": "trainer.steps is missing",
    "train model._target_=null": "model._target_=null: use the dotted name of what to call",
    "plan 'plan.device={flops: 1e12}'": "plan.device.memory is missing",
    "plan 'plan.fit=16 apples'": ": use a number of bytes, as 16GB",
    "plan pipeline.K=99": "pipeline.K=99 but the model has 20 layers",
    "eval compare=[nowhere]": "nowhere has not been evaluated yet: gpipe-eval checkpoint=nowhere",
    "eval compare=[]": "compare= names no run",
    "eval compare=[a] split=test": "there is no key split; here has: compare, baseline, output",
    "eval step=1 step=2": "step=2: give step one value",
    "train experiment=nmt": "did you mean experiment=nmt/bilingual or",
    "train checkpoint.allow_changes=[pipline]": "[pipline]: there is no key pipline; did you mean pipeline?",
    "train model=null": "model=null: model needs one of amoebanet, custom, module, ",
}
OUTSIDE = [*[*CASES][:37:18], "train data.pair=klingon"]  # its worker refuses it, and leaves its log


Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(case: str, code: object, text: str) -> None:
    assert CASES[case] in text and code == 2 and "Traceback" not in text, text
    assert len(text.splitlines()) <= SCREEN


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_real_command_refuses_a_wrong_command_line(case: str, tmp_path: Path) -> None:
    name, *words = shlex.split(case)
    done = command(name, *words, cwd=tmp_path, GPIPE_CACHE=str(tmp_path))
    check(case, done.returncode, done.stdout + done.stderr)


@pytest.mark.parametrize("case", [case for case in CASES if case not in OUTSIDE])
def test_the_answer_names_the_mistake(case: str, here: Path, capsys: Capture) -> None:
    name, *words = shlex.split(case)
    try:
        code = import_module(f"gpipe_cli.commands.{name}").main(words)
    except SystemExit as end:
        code = end.code
    written = capsys.readouterr()
    check(case, code, written.out + written.err)
    assert list(here.iterdir()) == []


def test_a_deleted_working_directory_is_told_in_one_line(here: Path, capsys: Capture) -> None:
    here.rmdir()
    assert import_module("gpipe_cli.commands.export").main(["run"]) == 2
    assert (
        capsys.readouterr().err == "gpipe-export: the working directory has been deleted: change to one that exists\n"
    )


def test_python_without_docstrings_has_no_help_and_no_traceback(tmp_path: Path) -> None:
    done = command("export", "--help", cwd=tmp_path, PYTHONOPTIMIZE="2")
    assert done.returncode == 0 and "PYTHONOPTIMIZE=2 leaves out the help" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["name='${os.environ}'"], "name: Interpolation key 'os.environ' not found"),
        (["hydra.run.dir="], "hydra.run.dir= is empty: name a folder, or leave it out"),
        (["data._target_=my_module.Images", "model.source_vocabulary=9"], "model.target_vocabulary=null: should be"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_the_answer_is_one_line_and_no_more(words: list[str], said: str, here: Path, capsys: Capture) -> None:
    with suppress(SystemExit):
        import_module("gpipe_cli.commands.train").main(words)
    written = capsys.readouterr().err
    assert said in written and written.count("\n") == 1


FILES = {
    "\ufeff# @package _global_\nseed: 3\n": "experiment=mine: its file changes nothing; it has to begin with",
    "": "# @package _global_",
    "seed: 3\n": "# @package _global_",
    "# @package _global_\n3: 4\n": "there is no key 3; here has: name",
    "# @package _global_\ndefaults: [mine]\n": "experiment=mine: a YAML file is in its own list of defaults",
}


@pytest.mark.parametrize(("text", "said"), FILES.items(), ids=["BOM", "empty", "no package", "number", "itself"])
def test_what_is_wrong_with_a_file_of_the_user_s_is_told(text: str, said: str, here: Path, capsys: Capture) -> None:
    (here / "conf" / "experiment").mkdir(parents=True)
    (here / "conf" / "experiment" / "mine.yaml").write_text(text)
    assert import_module("gpipe_cli.commands.train").main(["--config-dir=conf", "experiment=mine"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_record_of_a_run_that_cannot_be_read_is_named(here: Path) -> None:
    (here / ".hydra").mkdir(parents=True)
    (here / ".hydra" / "config.yaml").write_bytes(b"a: \xff")
    assert "config.yaml cannot be read" in read_run(here).outcome
