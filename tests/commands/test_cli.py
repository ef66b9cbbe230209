"""Tests `gpipe-train` as a person meets it: real processes, with a trainer that needs no torch (cli_jobs.py)."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cli_jobs
import pytest
from small_disk import small_disk

from gpipe_cli import gpus
from gpipe_cli.config import PipelineConfig, Settings
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import devices, own_target, sweep
from gpipe_cli.jobs.devices import Devices, settle_workers
from gpipe_cli.terminal.console import Console
from gpipe_cli.terminal.help import help_text
from gpipe_cli.terminal.runs import FinishedRun
from gpipe_cli.terminal.text import relative_paths, text_table

JOBS = Path(__file__).parents[1] / "jobs"
COMMAND = [sys.executable, str(JOBS / "cli_jobs.py")]
NO_RANK = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
ENVIRONMENT = {**NO_RANK, "PYTHONPATH": os.pathsep.join([str(JOBS), str(JOBS.parents[1])]), "COLUMNS": "100"}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


def only(folder: Path) -> Path:
    """Returns the only directory in a folder."""
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return found


# -- one run -----------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_configuration_its_log_and_says_where(tmp_path: Path) -> None:
    done = run(tmp_path, "pipeline.K=2", "trainer.steps=3")
    assert done.returncode == 0, done.stderr
    directory = only(tmp_path / "runs")
    assert {".hydra", "train.log", "summary.json"} <= {path.name for path in directory.iterdir()}
    assert "step 3/3  loss 1.6667" in (directory / "train.log").read_text()
    assert done.stdout.rstrip().endswith(f"tensorboard --logdir runs/{directory.name}")


def test_a_link_that_leads_out_of_the_run_directory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    directory, outside = tmp_path / "given", tmp_path / "outside"
    directory.mkdir()
    outside.write_text("mine\n")
    (directory / "train.log").symlink_to(outside)
    done = run(tmp_path, "pipeline.K=1", "trainer.steps=1", "hydra.run.dir=given")
    assert (done.returncode, done.stdout) == (1, "")
    said = f"given/train.log is a symbolic link to {outside}, outside the run directory: remove it"
    assert done.stderr.replace(f"{tmp_path}/", "") == f"gpipe-train: {said}\n".replace(f"{tmp_path}/", "")
    assert outside.read_text() == "mine\n" and [path.name for path in directory.iterdir()] == ["train.log"]


@pytest.mark.parametrize(
    ("options", "reason"), [("size=4k", "No space left"), ("ro", "Read-only"), ("nr_inodes=1", "No space left")]
)
def test_a_run_directory_that_cannot_be_written_is_told_in_one_line(options: str, reason: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "given", options):
        done = run(tmp_path, "pipeline.K=1", "trainer.steps=1", "hydra.run.dir=given")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr.count("\n") == 1
        and f"given cannot be written: {reason}" in done.stderr
        and "room left: " in done.stderr
    )


def test_workers_receive_the_resolved_configuration_and_the_start_of_the_command(tmp_path: Path) -> None:
    before = time.time()
    run(tmp_path, "pipeline.K=3", "pipeline.workers=2", "trainer.steps=1")
    received = json.loads((only(tmp_path / "runs") / "received.json").read_text())
    assert Settings.from_config(received["settings"]).pipeline.worker_count == 2
    assert before - 0.5 < received["started_at"] < time.time()


def test_lines_for_a_file_have_no_control_codes(tmp_path: Path) -> None:
    assert "\x1b" not in run(tmp_path, "pipeline.K=1", "trainer.steps=3").stdout


def test_a_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = [*COMMAND, "pipeline.K=1", "trainer.steps=4", f"seed={cli_jobs.SLOW}"]
    environment = {**ENVIRONMENT, "TERM": "xterm"}
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how a pseudo-terminal says that the other side is gone
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait(30) == 0
    assert "━".encode() in shown and b"4/4  loss 1.2500" in shown


def start(folder: Path, stdout: int, *words: str) -> subprocess.Popen[bytes]:
    """Starts a slow run of 8 steps."""
    command = [*COMMAND, *words, "pipeline.K=1", "trainer.steps=8", f"seed={cli_jobs.SLOW}"]
    environment = {**ENVIRONMENT, "TERM": "xterm"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=stdout, stderr=subprocess.PIPE)


def lose_reader(ours: int, theirs: int) -> None:
    """Reads the first output of a run, then closes the pipe; ``theirs`` is the run's end of it."""
    os.close(theirs)
    assert os.read(ours, 1)
    os.close(ours)


def ends_in_order(folder: Path, process: subprocess.Popen[bytes], reason: str) -> None:
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    directory = only(folder / "runs")
    assert (directory / "summary.json").is_file()
    said = (directory / "train.log").read_text()
    assert said.count("cannot be written to") == 1 and reason in said
    assert "step 8/8" in said


def test_a_run_whose_pipe_loses_its_reader_goes_on(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    process = start(tmp_path, theirs)
    lose_reader(ours, theirs)
    ends_in_order(tmp_path, process, "Broken pipe")


def test_a_run_whose_terminal_is_closed_goes_on(tmp_path: Path) -> None:
    """The run gets no hang-up signal, because it is no job of that terminal."""
    ours, theirs = pty.openpty()
    process = start(tmp_path, theirs)
    lose_reader(ours, theirs)
    ends_in_order(tmp_path, process, "Input/output error")


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--help"],
        pytest.param(["plan", "debug=tiny", "plan.format=json"], marks=pytest.mark.slow),
        ["train", "--help"],
    ],
    ids=" ".join,
)
def test_a_reader_that_has_seen_enough_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", f"gpipe_cli.commands.{words[0]}", *words[1:]]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_run_whose_output_is_on_a_full_disk_goes_on(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    process = start(tmp_path, full)
    os.close(full)
    ends_in_order(tmp_path, process, "No space left on device")


@pytest.mark.slow
def test_a_sweep_whose_pipe_loses_its_reader_goes_on_to_its_table(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    process = start(tmp_path, theirs, "-m", "pipeline.M=4,8")
    lose_reader(ours, theirs)
    assert process.wait(60) == 0
    jobs = json.loads((only(tmp_path / "sweeps") / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["done", "done"]


def test_a_failed_run_ends_with_its_traceback_and_exit_code_1(tmp_path: Path) -> None:
    failed = run(tmp_path, f"seed={cli_jobs.FAILS}", "pipeline.K=1")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-2] == "ValueError: thirteen is unlucky"
    assert "thirteen is unlucky" in (only(tmp_path / "runs") / "train.log").read_text()


def test_launch_inline_runs_every_cell_in_the_command_s_own_process(tmp_path: Path) -> None:
    done = run(tmp_path, "launch.inline=true", "pipeline.K=4", "trainer.steps=1")
    assert "4 cells on 1 worker (launch.inline=true)" in done.stdout
    assert not (only(tmp_path / "runs") / "workers").exists()


def test_two_runs_never_share_a_directory(tmp_path: Path) -> None:
    words = [*COMMAND, "pipeline.K=1", "trainer.steps=1"]
    both = [subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_run_directory_that_is_in_use_is_refused(tmp_path: Path) -> None:
    words = ["hydra.run.dir=here", "pipeline.K=1", "trainer.steps=50"]
    with subprocess.Popen(
        [*COMMAND, *words, f"seed={cli_jobs.SLOW}"], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    ) as first:
        wait_for(tmp_path / "here" / "workers" / "starter.log")
        second = run(tmp_path, *words)
        first.terminate()
    assert second.returncode == 2
    assert "another gpipe-train is writing to" in second.stderr


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path) -> None:
    program = (
        "import errno, fcntl, sys, cli_jobs\n"
        "def flock(*_): raise OSError(errno.ENOLCK, 'No locks available')\n"
        "fcntl.flock = flock\n"
        "program = cli_jobs.EntryPoint('cli_jobs:train', ('json',))\n"
        "sys.exit(cli_jobs.main(['pipeline.K=1', 'trainer.steps=1'], program))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has no locks (") == 1


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_a_resume_without_a_checkpoint_is_refused_before_workers_start(tmp_path: Path) -> None:
    refused = run(tmp_path, "checkpoint.resume=nowhere", "pipeline.K=1")
    assert refused.returncode == 2
    assert "nowhere holds no complete checkpoint" in refused.stderr
    assert not (only(tmp_path / "runs") / "workers").exists()


def test_resume_auto_without_any_checkpoint_begins_at_the_beginning(tmp_path: Path) -> None:
    assert run(tmp_path, "checkpoint.resume=auto", "pipeline.K=1", "trainer.steps=1").returncode == 0
    received = json.loads((only(tmp_path / "runs") / "received.json").read_text())
    assert received["settings"]["checkpoint"]["resume"] is None


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pipeline.k=4"], "there is no key pipeline.k; did you mean pipeline.K?"),
        (["model.Lx=3"], "there is no key model.Lx; did you mean model.L?"),
        (["optimizer.spead=3"], "there is no key optimizer.spead"),
        (["~optimizer.decay_only"], "optimizer.decay_only is null, and so cannot be deleted: leave out ~optimizer.dec"),
        (["~trainer.epochs"], "trainer.epochs is null, and so cannot be deleted: leave out ~trainer.epochs"),
        (["~optimizer.decay"], "there is no key optimizer.decay; did you mean optimizer.decay_only"),
        (["modle=transformer"], "there is no key modle; did you mean model?"),
        (["optimizer=adm"], "there is no optimizer=adm; did you mean optimizer=adam"),
        (["optimizer=lamb"], "optimizer can be: adafactor, adafactor_momentum, adam, adamw, rmsprop, rmsprop_tf, sgd"),
        (["pipeline.K=1,2"], "pipeline.K=1,2 is a sweep: type gpipe-train -m … pipeline.K=1,2"),
        (["pipeline.partition=[1,2"], "could not read 'pipeline.partition=[1,2'"),
        (["pipeline.K=0", "trainer.steps=x"], "gpipe-train: pipeline.K=0: use a whole number, at least 1\ntrainer."),
        (["data.batch_size=???"], "data.batch_size needs a value: type data.batch_size=…"),
        (["--pipeline.K=4"], "keys have no dashes, type pipeline.K=4"),
        (["--multi-run"], "there is no option --multi-run; did you mean --multirun"),
        (["--config-name=other"], "there is no configuration other.yaml"),
    ],
)
def test_a_refusal_is_one_sentence_and_leaves_nothing_behind(tmp_path: Path, words: list[str], message: str) -> None:
    refused = run(tmp_path, *words)
    assert message in refused.stderr
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr and "HYDRA_FULL_ERROR" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_key_in_a_yaml_of_the_user_s_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    (tmp_path / "conf" / "pipeline" / "mine.yaml").write_text("defaults: [default]\nmicro_batches: 8\n")
    refused = run(tmp_path, "--config-dir", "conf", "pipeline=mine")
    assert "there is no key pipeline.micro_batches" in refused.stderr


def test_a_yaml_that_cannot_be_read_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    (tmp_path / "conf" / "pipeline" / "mine.yaml").write_text("K: [3\n")
    refused = run(tmp_path, "--config-dir", "conf", "pipeline=mine")
    assert 'pipeline/mine.yaml", line 1' in refused.stderr and refused.returncode == 2


# -- a function of the user's ------------------------------------------------------------------------------------


def test_a_typed_target_gets_the_typed_keys_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "model._target_=my_module.my_layers", "model.width=64", "trainer.steps=1", "pipeline.K=1")
    assert done.returncode == 0, done.stderr
    received = json.loads((only(tmp_path / "runs") / "received.json").read_text())["settings"]
    assert received["model"] == {"_target_": "my_module.my_layers", "width": 64}
    assert done.stdout.count("model._target_=my_module.my_layers: called with width (keys that were not typed") == 1
    assert done.stdout.count("learning rate: 0.003 in every step (lr_schedule=constant; for others type") == 1
    assert only(tmp_path / "runs").name.endswith("_my_module.my_layers")


def test_a_typed_data_target_keeps_the_batch_size() -> None:
    config = {"data": {"_target_": "mine.Data", "batch_size": 8, "languages": None}}
    assert own_target.keys_left_out(config, ["++data._target_=mine.Data"]) == {"data": ["languages"]}


def test_a_typed_optimizer_and_schedule_get_the_typed_keys_and_the_learning_rate(tmp_path: Path) -> None:
    words = ["optimizer._target_=torch.optim.NAdam", "optimizer.momentum_decay=0.01", "pipeline.K=1", "trainer.steps=1"]
    assert run(tmp_path, *words, "lr_schedule._target_=my_module.flat", "lr_schedule.over=5").returncode == 0
    received = json.loads((only(tmp_path / "runs") / "received.json").read_text())["settings"]
    assert received["optimizer"] == {"_target_": "torch.optim.NAdam", "lr": 0.003, "momentum_decay": 0.01}
    assert received["lr_schedule"] == {"_target_": "my_module.flat", "over": 5}


def test_a_typed_target_needs_nothing_of_what_the_left_out_keys_refer_to(tmp_path: Path) -> None:
    """model=transformer takes its vocabulary from the data; images have none."""
    words = ["model._target_=my_module.my_layers", "data._target_=my_module.Images", "pipeline.K=1", "trainer.steps=1"]
    assert run(tmp_path, *words).returncode == 0


def test_a_reference_to_what_the_chosen_data_lacks_is_told_in_words(tmp_path: Path) -> None:
    refused = run(tmp_path, "data._target_=my_module.Images")
    assert (
        "model.source_vocabulary is taken from data.vocabulary, which the chosen data does not have" in refused.stderr
    )


def test_without_a_typed_target_no_key_is_left_out() -> None:
    config = {"model": {"_target_": "gpipe_cli.models.transformer.transformer", "L": 3}}
    assert own_target.keys_left_out(config, ["model.L=3", "pipeline.K=2"]) == {}


def test_keys_of_a_typed_target_need_no_plus() -> None:
    words = ["-m", "model._target_=mine.layers", "model.width=1,2", "+model.depth=3", "task.pad_id=0", "pipeline.K=2"]
    assert own_target.allow_new_keys(words) == [
        *("-m", "++model._target_=mine.layers", "++model.width=1,2"),
        *("+model.depth=3", "task.pad_id=0", "pipeline.K=2"),
    ]


# -- sweeps ------------------------------------------------------------------------------------------------------


def test_a_sweep_goes_on_after_a_failure_and_ends_in_one_table(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "pipeline.K=1,2", f"seed=1,{cli_jobs.FAILS}", "trainer.steps=1", "data.cache_dir=a/b")
    assert done.returncode == 1
    directory = only(tmp_path / "sweeps")
    table = json.loads((directory / "sweep.json").read_text())
    assert table["swept"] == ["pipeline.K", "seed"]
    assert [(job["K"], job["loss"], job["status"]) for job in table["jobs"]] == [
        *((1, 1.0, "done"), (1, None, "failed")),
        *((2, 0.5, "done"), (2, None, "failed")),
    ]
    assert "job 2/4  pipeline.K=1 seed=13" in done.stdout
    assert (
        "| 1 | 13 | 1 | 4 | - | - | - | - | - | - | - | failed: ValueError: thirteen is unlucky |"
        in (directory / "sweep.md").read_text()
    )
    failed = next(path for path in directory.iterdir() if path.name.startswith("1_"))
    assert "thirteen is unlucky" in (failed / "train.log").read_text()


@pytest.mark.slow
def test_a_sweep_over_seeds_ends_in_mean_and_standard_deviation(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "seed=1,2,3", "pipeline.K=2", "trainer.steps=1")
    directory = only(tmp_path / "sweeps")
    assert json.loads((directory / "sweep.json").read_text())["over_seeds"] == [
        {
            "overrides": {},
            "jobs": [0, 1, 2],
            "loss": {"mean": 0.5, "standard_deviation": 0.0},
            "evaluation": {
                "nll": {"mean": 2.25, "standard_deviation": 0.0},
                "accuracy": {"mean": pytest.approx(0.92), "standard_deviation": pytest.approx(0.01)},
            },
        }
    ]
    last = (directory / "sweep.md").read_text().splitlines()[-1]
    assert last == "| mean ± sd | 3 seeds | 2 | 4 | 0.5 ± 0 | - | - | - | - | 2.25 ± 0 | 0.92 ± 0.01 | - |"
    assert "0.92 ± 0.01" in done.stdout


def job(number: int, accuracy: float | None, status: str = "done", **overrides: str) -> sweep.JobResult:
    evaluation = {} if accuracy is None else {"accuracy": accuracy}
    return sweep.JobResult(number, overrides, FinishedRun(Path(), status, K=1, M=1, evaluation=evaluation))


def test_a_spread_is_written_with_two_digits() -> None:
    assert [str(sweep.Spread(*values)) for values in ((0.934567, 0.012345), (0.5, 0.0), (3703.2, 632.4))] == [
        *("0.9346 ± 0.012", "0.5 ± 0", "3,703 ± 632.4"),
    ]


def test_seeds_are_taken_together_for_each_combination_of_the_other_swept_keys() -> None:
    jobs = [job(2 * i + s, 0.1 * i + 0.02 * s, seed=str(s), lr=str(i)) for i in range(3) for s in range(2)]
    found = sweep.over_seeds(jobs)
    assert [(seeds.overrides, [job.number for job in seeds.jobs]) for seeds in found] == [
        *(({"lr": "0"}, [0, 1]), ({"lr": "1"}, [2, 3]), ({"lr": "2"}, [4, 5])),
    ]
    assert found[1].evaluation["accuracy"].mean == pytest.approx(0.11)


def test_jobs_that_failed_and_seeds_that_stand_alone_have_no_spread() -> None:
    jobs = [job(0, 0.5, seed="1", lr="1"), job(1, None, "failed", seed="2", lr="1"), job(2, 0.5, seed="1", lr="2")]
    assert sweep.over_seeds(jobs) == []
    assert sweep.over_seeds([job(0, 0.5, lr="1"), job(1, 0.5, lr="2")]) == []


def test_a_job_that_is_refused_is_a_failed_job_of_the_sweep(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "pipeline.K=0,1", "trainer.steps=1")
    table = json.loads((only(tmp_path / "sweeps") / "sweep.json").read_text())
    assert [job["status"] for job in table["jobs"]] == ["failed", "done"]
    assert table["jobs"][0]["error"] == "pipeline.K=0: use a whole number, at least 1"
    assert done.returncode == 1


def test_a_sweep_without_failures_exits_with_0(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "pipeline.K=1,2", "trainer.steps=1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_whole_sweep_and_still_shows_the_table(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    words = [*COMMAND, "-m", f"seed={cli_jobs.SLOW},1", "trainer.steps=100", "pipeline.K=1"]
    with subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "step 1/100" not in process.stdout.readline():
            pass
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == code
    assert "1 more were not started" in rest


def test_the_number_of_jobs_is_known_for_choices_and_ranges() -> None:
    assert sweep.count_jobs(["a=1,2,3", "b=range(5)", "c=x", "d=choice(p,q)"]) == 30


def test_folders_of_jobs_are_named_by_what_is_swept(tmp_path: Path) -> None:
    """TensorBoard shows these names, and they are cut where they are long."""
    fixed = ["data.cache_dir=" + "long/" * 30, "trainer.steps=1", "+model.own_key=3", "precision=bf16"]
    run(tmp_path, "-m", *fixed, "pipeline.K=1,2", "pipeline.M=4,8")
    names = sorted(folder.name for folder in only(tmp_path / "sweeps").iterdir() if folder.is_dir())
    cells = [(K, M) for K in (1, 2) for M in (4, 8)]
    assert names == [f"{number}_pipeline.K={K},pipeline.M={M}" for number, (K, M) in enumerate(cells)]


def test_names_of_job_folders_are_safe() -> None:
    assert sweep.folder_name("data.root=/a b/c,pipeline.K=2") == "data.root=_a_b_c,pipeline.K=2"
    assert len(sweep.folder_name("x" * 500)) == sweep.LONGEST_NAME
    assert sweep.folder_name(None, "transformer") == "transformer"


# -- under torchrun ----------------------------------------------------------------------------------------------


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *COMMAND[1:]]
    return subprocess.run([*start, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_torchrun_s_processes_are_the_workers_of_one_run(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "trainer.steps=1", "launch.stall_seconds=60")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("launch.stall_seconds does nothing here") == 1
    assert done.stdout.count("4 cells on 2 workers (WORLD_SIZE=2)") == 1
    assert (only(tmp_path / "runs") / "received.json").is_file()


@pytest.mark.slow
def test_torchrun_refuses_a_sweep_over_K(tmp_path: Path) -> None:
    refused = torchrun(tmp_path, "-m", "pipeline.K=2,4")
    assert "drop torchrun, and gpipe-train starts the workers of each job itself" in refused.stderr
    assert list(tmp_path.iterdir()) == []


# -- workers and devices -----------------------------------------------------------------------------------------


PIPELINE = PipelineConfig(
    K=16,
    M=4,
    remat="never",
    schedule="gpipe",
    partition="min_max",
    cost="flops",
    workers="auto",
    replicas=1,
    threads=1,
    backend="auto",
    device="auto",
    sync_batchnorm=False,
    compile=False,
    shard_optimizer=False,
)


@pytest.mark.parametrize(
    ("changes", "machine", "workers", "line"),
    [
        ({}, Devices(2, "core"), 2, "16 cells on 2 workers (2 cores)"),
        ({"K": 4}, Devices(8, "GPU"), 4, "4 cells on 4 workers (8 GPUs)"),
        ({"replicas": 4}, Devices(8, "GPU"), 2, "16 cells on 2 workers × 4 replicas (8 GPUs)"),
        ({"replicas": 4}, Devices(2, "core"), 1, "16 cells on 1 worker × 4 replicas (2 cores)"),
        ({"threads": 4}, Devices(8, "core"), 2, "16 cells on 2 workers (8 cores)"),
        ({"workers": 16}, Devices(2, "core"), 16, "16 cells on 16 workers (pipeline.workers=16)"),
        ({"schedule": "interleaved_1f1b"}, Devices(7, "core"), 4, "16 cells on 4 workers (7 cores)"),
    ],
)
def test_workers_follow_the_devices(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], machine: Devices, workers: int, line: str
) -> None:
    monkeypatch.setattr(devices, "find_devices", lambda device: machine)
    assert settle_workers(replace(PIPELINE, **changes), inline=False, world_size=None) == (workers, line)


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({"workers": 3}, 4, "needs 3 processes but WORLD_SIZE=4"),
        ({"replicas": 3}, 4, "pipeline.replicas=3 does not divide WORLD_SIZE=4"),
        ({"K": 2}, 4, "use pipeline.K>=4, or start torchrun with 2 processes in all"),
        ({"schedule": "interleaved_1f1b"}, 3, r"no multiple of 3 workers \(WORLD_SIZE=3\): use pipeline.K=18"),
    ],
)
def test_a_job_of_the_wrong_size_is_refused(changes: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settle_workers(replace(PIPELINE, **changes), inline=False, world_size=world_size)


def test_gpus_are_those_that_cuda_programs_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_installed_gpus", lambda: 4)
    seen = {}
    for visible in ("0,1", "", "-1", "2", "0,1,2,3,4,5"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        seen[visible] = gpus.count_gpus()
    assert seen == {"0,1": 2, "": 0, "-1": 0, "2": 1, "0,1,2,3,4,5": 4}


@pytest.mark.parametrize(("visible", "number"), [("7", 0), ("NoDevFiles", 0), ("GPU-a,MIG-b", 2)])
def test_names_that_no_gpu_has_are_none(visible: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NoDevFiles is what Slurm gives to a job without GPUs; a worker would take one more for a driver that fails."""
    monkeypatch.setattr(gpus, "_installed_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.count_gpus() == number


# -- what the console shows --------------------------------------------------------------------------------------


def shown(*events: dict[str, object], every: int = 1, brief: bool = False) -> str:
    output = io.StringIO()
    with redirect_stdout(output), Console(every, "plain", brief=brief) as console:
        for event in events:
            console(event)
    return output.getvalue()


def test_what_a_terminal_cannot_show_is_a_question_mark() -> None:
    written = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(written, encoding="ascii")), Console(1, "plain") as console:
        console.say("8.1 → 7.9")
        console.say("on")
    assert written.getvalue() == b"8.1 ? 7.9\non\n"


def test_an_output_that_somebody_has_closed_ends_no_run() -> None:
    output = io.StringIO()
    with redirect_stdout(output), Console(1, "plain") as console:
        output.close()
        console.say("still here")


def test_plain_progress_tells_the_first_step_the_last_and_not_too_many_between() -> None:
    lines = shown(*(cli_jobs.progress(step, 1000) for step in range(1, 1001)), every=10).splitlines()
    assert lines[0].startswith("step 1/1,000") and lines[-1].startswith("step 1,000/1,000")
    assert len(lines) < 5


def test_a_run_of_a_sweep_is_a_few_lines() -> None:
    row = {"cell": 0, "worker": 0, "layers": 3, "first": "a", "last": "b", "parameters": 12345, "cost": 1, "share": 0.5}
    events: list[dict[str, object]] = [
        {"kind": "message", "text": "4 cells on 2 workers"},
        {"kind": "cells", "rows": [row]},
        *(cli_jobs.progress(step, 100) for step in range(1, 101)),
        {"kind": "evaluation", "step": 100, "numbers": {"nll": 2.5}},
        {"kind": "samples", "rows": [{"source": "a", "output": "b"}]},
        {"kind": "end", "text": "loss 5 -> 0.05"},
    ]
    lines = shown(*events, brief=True).splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        "step 1/100",
        "evaluation after step 100: nll 2.5",
        "loss 5 -> 0.05",
    ]


def test_paths_are_relative_to_where_the_person_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert relative_paths(f"log: {tmp_path}/runs/x and /elsewhere") == "log: runs/x and /elsewhere"


def test_debug_tiny_says_what_it_cannot_make_smaller(tmp_path: Path) -> None:
    said = run(tmp_path, "debug=tiny", "model._target_=my_module.layers", "trainer.steps=1").stdout
    assert "cannot make your own model smaller" in said and "your own data" not in said
    assert "cannot make" not in run(tmp_path, "debug=tiny", "trainer.steps=1").stdout


def test_the_time_left_follows_from_the_share_done_whatever_limits_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 30))  # the clock is read twice at the first step, and twice at each that follows
    monkeypatch.setattr("gpipe_cli.terminal.console.time", SimpleNamespace(monotonic=ticks.__next__))
    events = [{**cli_jobs.progress(step, None), "done": done} for step, done in ((1, 0.25), (2, 0.5), (3, 1.0))]
    first, second, last = shown(*events).splitlines()
    assert "left" not in first and "left" not in last
    assert second.endswith("2:00 left")  # a quarter took a minute


def test_numbers_that_are_not_known_are_shown_as_such() -> None:
    line = shown({**cli_jobs.progress(1, None), "loss": None, "bubble": None, "skipped_updates": 2})
    assert line == "step 1  loss not finite  lr 1.0e-03  800 examples/s  bubble -  2 skipped\n"


def test_the_bubble_stands_beside_the_schedules_own() -> None:
    line = shown({**cli_jobs.progress(2, None), "bubble_predicted": 0.15})
    assert "bubble 20.0 % (schedule 15.0 %)" in line


def test_the_table_of_cells_is_aligned() -> None:
    row = {"cell": 0, "worker": 0, "layers": 3, "first": "a", "last": "b", "parameters": 12345, "cost": 1, "share": 0.5}
    assert (
        shown({"kind": "cells", "rows": [row]}).splitlines()[2] == "   0       0       3  a     b       12,345  50.0 %"
    )


def test_events_of_the_launcher_are_told_in_words() -> None:
    text = shown(
        {"event": "stopping", "signal": "SIGINT", "grace_seconds": 8.0}, {"event": "warning", "message": "slow disk"}
    )
    assert text.startswith("SIGINT: the run stops after this step and saves, within 8 s")
    assert "warning: slow disk" in text


def test_other_events_are_not_shown() -> None:
    assert shown({"kind": "heartbeat"}) == ""


def test_a_table_puts_numbers_to_the_right() -> None:
    assert text_table(["name", "n"], [["a", 5], ["long", 1234]]) == "name      n\n----  -----\na         5\nlong  1,234"


# -- help, and the speed of short answers ------------------------------------------------------------------------


def test_help_is_short_and_names_every_group_with_its_options() -> None:
    text = help_text()
    assert len(text.splitlines()) <= 48
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "transformer*  transformer_lm" in text
    assert "adafactor_momentum  adam*" in text
    assert "    pipeline.K              4  " in text


def test_every_key_of_the_help_can_be_typed() -> None:
    from gpipe_cli.config import FREE_FORM, known_keys
    from gpipe_cli.terminal.help import KEYS

    assert all(key in known_keys() or key.partition(".")[0] in FREE_FORM for key, _ in KEYS)


def test_version_is_that_of_the_package() -> None:
    from gpipe_cli import __version__

    answer = subprocess.run([*COMMAND, "--version"], env=ENVIRONMENT, capture_output=True, text=True)
    assert answer.stdout == f"gpipe-train {__version__}\n"


def fastest(command: list[str], folder: Path, enough: float = 0.0) -> float:
    """Seconds of processor time, the least of up to ten: other work on the machine only ever adds.

    Args:
        enough: stop as soon as one is below this; 0: three times.
    """
    times = [math.inf]
    while len(times) <= (10 if enough else 3) and min(times) >= enough:
        before = os.times()
        subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(times)


@pytest.mark.parametrize("words", [["--help"], ["pipeline.k=4"], ["pipeline.K=0"], ["--cfg", "job"]])
def test_short_answers_come_within_half_a_second(tmp_path: Path, words: list[str]) -> None:
    slower = fastest([sys.executable, "-c", "import hydra, hydra.utils"], tmp_path) / 0.2  # than a machine of 2024
    limit = 0.5 * max(1.0, slower)
    assert fastest([sys.executable, "-m", "gpipe_cli.commands.train", *words], tmp_path, enough=limit) < limit


@pytest.mark.parametrize(("words", "times"), [(["pipeline.K=0"], 1), (["hydra.mode=RUN", "pipeline.K=0"], 2)])
def test_a_refusal_composes_the_configuration_no_more_often_than_needed(
    tmp_path: Path, words: list[str], times: int
) -> None:
    program = (
        "import cli_jobs, sys; from hydra._internal.hydra import Hydra; compose = Hydra.compose_config; seen = []; "
        "Hydra.compose_config = lambda *a, **k: (seen.append(1), compose(*a, **k))[1]\n"
        f"try: cli_jobs.main({words})\n"
        "finally: print(len(seen))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{times}\n", done.stderr
    assert "pipeline.K=0: use a whole number" in done.stderr


def test_a_mode_that_is_typed_is_heard(tmp_path: Path) -> None:
    assert run(tmp_path, "hydra.mode=MULTIRUN", "pipeline.K=1,2", "trainer.steps=1").returncode == 0
    assert [job["K"] for job in json.loads((only(tmp_path / "sweeps") / "sweep.json").read_text())["jobs"]] == [1, 2]


def test_the_command_process_never_imports_torch(tmp_path: Path) -> None:
    program = (
        "import sys, cli_jobs; code = cli_jobs.main(['pipeline.K=1', 'trainer.steps=1'], "
        "cli_jobs.EntryPoint('cli_jobs:train', ('json',))); print('torch' in sys.modules, code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "False 0", done.stderr
