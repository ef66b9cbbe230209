"""Tests `gpipe-train` as a person meets it: real processes, with a trainer that needs no torch (cli_jobs.py)."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import cli_jobs
import processes
import pytest
from launch_command import wait_for
from processes import command
from run_files import bytes_of

from gpipe_cli.commands import plan, train
from gpipe_cli.jobs import configuration
from gpipe_cli.jobs.configuration import LONGEST_NAME, folder_name

COMMAND = [sys.executable, cli_jobs.__file__]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100", "TERM": "xterm"}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return processes.run(*COMMAND, *words, cwd=folder, COLUMNS="100")


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
    log = (directory / "train.log").read_text()
    assert "step 3/3  loss 1.6667" in log and "optimizer=muon lr_schedule=inverse_sqrt" in log
    assert done.stdout.rstrip().endswith(f"tensorboard --logdir runs/{directory.name}")


def test_a_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    in_a_terminal = [sys.executable, "-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]))"]
    words = [*in_a_terminal, *COMMAND, "pipeline.K=1", "trainer.steps=4", f"seed={cli_jobs.SLOW}"]
    shown = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    assert "━".encode() in shown and b"4/4  loss 1.2500" in shown


def start(folder: Path, stdout: int, *words: str) -> subprocess.Popen[bytes]:
    """Starts a slow run of 8 steps."""
    command = [*COMMAND, *words, "pipeline.K=1", "trainer.steps=8", f"seed={cli_jobs.SLOW}"]
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=stdout, stderr=subprocess.PIPE)


def test_a_run_whose_pipe_loses_its_reader_goes_on(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    process = start(tmp_path, theirs)
    os.close(theirs)
    assert os.read(ours, 1)
    os.close(ours)
    assert (process.communicate(timeout=60)[1], process.returncode) == (b"", 0)
    said = (only(tmp_path / "runs") / "train.log").read_text()
    assert said.count("cannot be written to") == 1 and "Broken pipe" in said and "step 8/8" in said


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "gpipe_cli.commands.train", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failed_run_ends_with_its_traceback_and_exit_code_1(tmp_path: Path) -> None:
    failed = run(tmp_path, f"seed={cli_jobs.FAILS}", "pipeline.K=1")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-2] == "ValueError: thirteen is unlucky"
    assert "thirteen is unlucky" in (only(tmp_path / "runs") / "train.log").read_text()


def test_ctrl_c_says_which_step_is_saved_and_what_goes_on(tmp_path: Path) -> None:
    with start(tmp_path, subprocess.PIPE, "hydra.run.dir=a run", "checkpoint.resume=null") as process:
        assert process.stdout is not None
        while b"step 1/8" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().decode()
    (step,) = [int(path.name[5:]) for path in (tmp_path / "a run" / "checkpoints").iterdir()]
    words = "'hydra.run.dir=\"a run\"' checkpoint.resume=auto"
    assert f"stopped before its end; step {step} is saved. To go on, type the same with {words}\n" in rest


def test_a_run_directory_that_is_in_use_is_refused(tmp_path: Path) -> None:
    words = ["hydra.run.dir=here", "pipeline.K=1", "trainer.steps=500"]
    slow = [*COMMAND, *words, f"seed={cli_jobs.SLOW}"]
    with subprocess.Popen(slow, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as first:
        wait_for((tmp_path / "here" / "workers" / "starter.log").exists)
        second = run(tmp_path, *words)
        first.terminate()
    assert second.returncode == 2
    assert "another gpipe-train is writing to" in second.stderr


def test_a_run_that_a_worker_refuses_leaves_nothing(tmp_path: Path) -> None:
    refused = run(tmp_path, f"seed={cli_jobs.REFUSES}", "pipeline.K=1")
    assert refused.returncode == 2 and "fourteen is refused" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "by WORLD_SIZE this process is one of a job, but RANK is not set, MASTER_ADDR is not"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "by OMPI_COMM_WORLD_SIZE this process is one of a job, but RANK is not set"),
        ({"RANK": "0"}, "but WORLD_SIZE is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set, MASTER_PORT is not set"),
    ],
)
def test_what_a_launcher_has_set_in_part_is_refused(environment: dict[str, str], said: str, tmp_path: Path) -> None:
    done = command("train", "debug=tiny", cwd=tmp_path, **environment)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_ctrl_c_that_a_library_swallows_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        with suppress(BaseException):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configuration, "compose", interrupted)
    assert plan.main(["debug=tiny"]) == train.main(["debug=tiny", "pipeline.K=1", "launch.inline=true"]) == 130


NO_FORK = """import os, resource, sys; from gpipe_cli.terminal.command import run_command
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)); os.geteuid() or os.setuid(65534)
sys.exit(run_command("gpipe-train", [], "", lambda _: os.fork()))"""


@pytest.mark.parametrize(
    ("limit", "words", "code", "said"),
    [
        ("ulimit -n 12", "-m gpipe_cli.commands.train debug=tiny hydra.run.dir=run", 1, "allows no more open files"),
        ("true", f"-c '{NO_FORK}'", 1, "allows no more processes"),
    ],
)
def test_what_the_system_has_too_little_of_is_one_line(
    limit: str, words: str, code: int, said: str, tmp_path: Path
) -> None:
    done = processes.run("sh", "-c", f"{limit} && exec {sys.executable} {words}", cwd=tmp_path)
    assert done.returncode == code and said in done.stderr and done.stderr.count("\n") == 1


def test_a_refused_command_changes_nothing_of_an_earlier_run_but_its_logs(tmp_path: Path) -> None:
    def kept() -> dict[str, bytes]:
        return {path: held for path, held in bytes_of(tmp_path / "here").items() if not path.endswith(".log")}

    words = ["hydra.run.dir=here", "pipeline.K=1", "trainer.steps=1"]
    assert run(tmp_path, *words).returncode == 0
    (tmp_path / "here" / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "here" / "restarts.jsonl").write_text("{}\n")
    before = kept()
    assert run(tmp_path, *words, "seed=77").returncode == 2
    assert kept() == before
    (tmp_path / "here" / "checkpoints" / "step_00000001").rmdir()
    assert run(tmp_path, *words, f"seed={cli_jobs.REFUSES}").returncode == 2
    assert kept() == before
    assert run(tmp_path, *words).returncode == 0
    assert not (tmp_path / "here" / "restarts.jsonl").exists()


# -- a function of the user's ------------------------------------------------------------------------------------


def test_a_function_of_the_user_s_gets_the_typed_keys_alone(tmp_path: Path) -> None:
    words = ["model._target_=my_module.my_layers", "model.width=64", "data._target_=my_module.Images"]
    words += ["optimizer._target_=torch.optim.NAdam", "optimizer.momentum_decay=0.01", "trainer.steps=1"]
    done = run(tmp_path, *words, "lr_schedule._target_=my_module.flat", "lr_schedule.over=5", "pipeline.K=1")
    assert done.returncode == 0, done.stderr
    received = json.loads((only(tmp_path / "runs") / "received.json").read_text())["settings"]
    assert received["model"] == {"_target_": "my_module.my_layers", "width": 64}
    assert received["data"] == {"_target_": "my_module.Images", "batch_size": 96}
    assert received["optimizer"] == {"_target_": "torch.optim.NAdam", "lr": 0.003, "momentum_decay": 0.01}
    assert received["lr_schedule"] == {"_target_": "my_module.flat", "over": 5}
    assert only(tmp_path / "runs").name.endswith("_my_module.my_layers")


# -- sweeps ------------------------------------------------------------------------------------------------------


def test_a_sweep_goes_on_after_a_failure_and_ends_in_one_table(tmp_path: Path) -> None:
    swept = ("pipeline.K=0,2", f"seed=1,{cli_jobs.FAILS}")
    done = run(tmp_path, "-m", *swept, "trainer.steps=1", "data.cache_dir=a/b")
    assert done.returncode == 1
    directory = only(tmp_path / "sweeps")
    table = json.loads((directory / "sweep.json").read_text())
    assert {*table["swept"]} == {"pipeline.K", "seed"}
    assert [(job["K"], job["loss"], job["status"]) for job in table["jobs"]] == [
        *((0, None, "failed"), (0, None, "failed")),
        *((2, 0.5, "done"), (2, None, "failed")),
    ]
    assert table["jobs"][0]["error"] == "pipeline.K=0: should be greater than or equal to 1"
    assert "job 3  pipeline.K=2 seed=13" in done.stdout
    assert "failed: ValueError: thirteen is unlucky" in done.stdout
    failed = next(path for path in directory.iterdir() if path.name.startswith("3_"))
    assert "thirteen is unlucky" in (failed / "train.log").read_text()


@pytest.mark.parametrize(
    ("subdir", "names"),
    [("K${pipeline.K}", {"K0", "K-1"}), ("${hydra.job.override_dirname}", {"pipeline.K=0", "pipeline.K=-1"})],
)
def test_a_sweep_s_folders_are_named_by_each_job_s_own_values(subdir: str, names: set[str], tmp_path: Path) -> None:
    run(tmp_path, "-m", "pipeline.K=0,-1", "seed=3", "hydra.sweep.dir=all", f"hydra.sweep.subdir={subdir}")
    assert {path.name for path in (tmp_path / "all").iterdir() if path.is_dir()} == names


def test_names_of_job_folders_are_safe() -> None:
    assert folder_name("++model.L=2,data.root=/a b/c") == "model.L=2,data.root=_a_b_c"
    assert len(folder_name("x" * 500)) == LONGEST_NAME and len(folder_name("日" * 500).encode()) in (99, 100)


def test_a_signal_ends_the_whole_sweep_and_still_shows_the_table(tmp_path: Path) -> None:
    words = [*COMMAND, "-m", f"seed={cli_jobs.SLOW},1", "trainer.steps=100", "pipeline.K=1"]
    with subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "step 1/100" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 143
    assert "run directory: sweeps/" in rest
