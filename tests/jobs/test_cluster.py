"""Tests of runs over several machines: torchrun, srun, submitit, and a run directory that is not shared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from inline_run import train_inline
from processes import command
from run_files import losses
from torch.distributed import HashStore
from two_machines import TwoMachines, permitted

from gpipe_cli.checkpoint.files import step_directories
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import torchrun
from gpipe_cli.launch.context import Context
from gpipe_cli.launch.join import adopt_step, first_host

WORDS = ["debug=tiny", "pipeline.K=4", "trainer.steps=6", "trainer.samples=0", "logging.tensorboard=false"]
WORDS += ["trainer.evaluate_first=false", "trainer.evaluate_every=null", "checkpoint.every=2", "task.generation=null"]
STEP = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "n[07-08]"}
JOB = {"SLURM_JOB_ID": "100", "SLURM_STEP_ID": "3"}


def test_a_task_of_srun_is_a_rank() -> None:
    environment = {**STEP, **JOB}
    adopt_step(environment)
    rank = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n07", "MASTER_PORT": "21603"}
    assert {name: environment[name] for name in rank} == rank
    adopt_step(reserved := {**STEP, **JOB, "SLURM_STEP_RESV_PORTS": "12007-12008"})
    assert reserved["MASTER_PORT"] == "12007"  # which no other job has


@pytest.mark.parametrize(
    "environment",
    [
        {**JOB, **STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "100", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {**JOB, **STEP, "RANK": "0", "WORLD_SIZE": "2"},
        {**JOB, **STEP, "OMPI_COMM_WORLD_RANK": "3"},
    ],
    ids=["a step of one task", "a batch script", "torchrun inside srun", "mpirun inside srun"],
)
def test_other_processes_of_slurm_are_no_ranks(environment: dict[str, str]) -> None:
    before = dict(environment)
    adopt_step(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("gpu[003-007,012],x1", "gpu003"), ("a-1,a-2", "a-1"), ("r[1-2]-ib,z", "r1-ib"), ("n[9]", "n9")],
)
def test_rank_0_runs_on_the_first_host_of_slurms_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def directories_refused(folders: list[Path]) -> list[str]:
    """Returns what each rank says, where rank i sees folder i as the run directory."""
    store = HashStore()

    def one(rank: int) -> str:
        context = Context(rank, len(folders), rank, folders[rank], lambda: store, lambda event: None, lambda: False)
        try:
            torchrun.refuse_separate_directories(context)
        except ConfigurationError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as threads:
        return list(threads.map(one, range(len(folders))))


def test_all_ranks_refuse_a_run_directory_that_one_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "SHARED_SECONDS", 0.3)
    assert directories_refused([tmp_path] * 3) == [""] * 3
    said = directories_refused([tmp_path, tmp_path, tmp_path / "elsewhere"])
    assert all("is not there for rank 2 on " in text and "that all machines share" in text for text in said)


# -- two machines ------------------------------------------------------------------------------------------------------


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    if not permitted():
        pytest.skip("needs root, and namespaces of networks and mounts")
    made = TwoMachines(tmp_path)
    yield made
    made.close()


def ends(started: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Waits for all; returns exit codes and outputs."""
    with ThreadPoolExecutor() as threads:
        said = list(threads.map(lambda each: each.communicate(timeout=240)[0], started))
    return [(each.returncode, text) for each, text in zip(started, said, strict=True)]


@pytest.mark.slow(2)
def test_two_machines_train_are_killed_on_one_side_and_go_on(machines: TwoMachines, tmp_path: Path) -> None:
    run_dir = machines.shared / "run"
    words = [*WORDS, f"hydra.run.dir={run_dir}"]
    both = [machines.torchrun(side, 2, *words, "trainer.steps=100000") for side in (0, 1)]
    while not step_directories(run_dir) and all(each.poll() is None for each in both):
        time.sleep(0.05)
    os.killpg(both[1].pid, signal.SIGKILL)
    assert [code for code, _ in ends(both)][1] == -signal.SIGKILL
    saved = int(step_directories(run_dir)[-1].name.partition("_")[2])
    steps = f"trainer.steps={saved + 4}"
    again = ends([machines.torchrun(side, 2, *words, steps, "checkpoint.resume=auto") for side in (0, 1)])
    assert [code for code, _ in again] == [0, 0], again
    train_inline(tmp_path / "whole", *WORDS, "pipeline.workers=1", steps)
    assert losses(run_dir) == losses(tmp_path / "whole")


@pytest.mark.slow(2)
def test_srun_alone_starts_a_run_on_two_machines(machines: TwoMachines, tmp_path: Path) -> None:
    words = [*WORDS, f"hydra.run.dir={machines.shared / 'run'}"]
    for code, text in ends([task for side in (0, 1) for task in machines.srun(side, 2, *words)]):
        assert code == 0, text
    train_inline(tmp_path / "whole", *WORDS, "pipeline.workers=1")
    assert losses(machines.shared / "run") == losses(tmp_path / "whole")


# -- a sweep's jobs side by side ---------------------------------------------------------------------------------------


@pytest.mark.slow(2)
@pytest.mark.skipif(find_spec("submitit") is None, reason="needs the extra slurm: hydra-submitit-launcher")
def test_a_sweep_through_submitit_runs_its_jobs_in_processes_of_their_own(tmp_path: Path) -> None:
    words = ["-m", "hydra/launcher=submitit_local", "pipeline.workers=1", f"hydra.sweep.dir={tmp_path}", *WORDS]
    done = command("train", *words, "pipeline.K=1,2,1000")
    jobs = json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["done", "done", "failed"], done.stdout + done.stderr
    assert jobs[0]["loss"] == jobs[1]["loss"]
    assert "pipeline.K=1000" in jobs[2]["error"]
    assert done.returncode == 1
