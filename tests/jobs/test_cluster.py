"""Tests the workers that a run gets, on one machine or several: GPUs, torchrun, srun, submitit, separate folders."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from composed import composed
from inline_run import train_inline
from processes import TRAIN, command
from run_files import losses
from torch.distributed import HashStore

from gpipe_cli import gpus
from gpipe_cli.checkpoint.files import step_directories
from gpipe_cli.config import PipelineConfig
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import configuration, torchrun
from gpipe_cli.jobs.configuration import choose_workers
from gpipe_cli.launch.context import Context
from gpipe_cli.launch.join import adopt_step, first_host

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "tbf rate 400mbit burst 256kb latency 200ms"
SETUP = "set -e; mount --make-rprivate /; mount --bind {own} {local}; mount -t tmpfs tmpfs /dev/shm; hostname {name}; "
SETUP += "mount --bind {own}/boot_id /proc/sys/kernel/random/boot_id; mount --bind {own}/hosts /etc/hosts; "
SETUP += 'cd {local}; exec "$@"'


def permitted() -> bool:
    """Returns whether this process may make namespaces with devices, as root can outside of most containers."""
    script = "ip link add gp0 type veth peer name gp1 && mount -t tmpfs tmpfs /mnt"
    done = subprocess.run(["unshare", "--net", "--mount", "--uts", "sh", "-c", script], capture_output=True)
    return done.returncode == 0


class TwoMachines:
    """Imitates two machines on this one: two network namespaces with a slow link; `close` removes them.

    Both see the folder `shared`; each has its own `local` (its HOME), /dev/shm, host name, hosts file and boot id.

    Args:
        folder: place of their files.
    """

    def __init__(self, folder: Path) -> None:
        self.shared, self.local = folder / "shared", folder / "local"
        self.names = [f"gpipe{os.getpid()}{side}" for side in "ab"]
        for path in (self.shared, self.local, *(folder / name for name in self.names)):
            path.mkdir()
        self._folder = folder
        hosts = "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, self.names, strict=True))
        for name in self.names:
            (folder / name / "boot_id").write_text(f"{name}\n")
            (folder / name / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
            _ip("netns", "add", name)
        a, b = self.names
        _ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            limit = ["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *LINK.split()]
            subprocess.run(limit, capture_output=True, check=False)  # without tc the link is fast

    def start(self, side: int, command: list[str], **variables: str) -> subprocess.Popen[str]:
        """Starts a command on one of the machines, in a session of its own; its output is kept."""
        name = self.names[side]
        script = SETUP.format(own=self._folder / name, local=self.local, name=name)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(self.local), "GLOO_SOCKET_IFNAME": "eth0"}
        words: list[Any] = ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", script, "sh"]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment |= variables
        return subprocess.Popen([*words, *command], env=environment, start_new_session=True, **streams)

    def torchrun(self, side: int, workers: int, *words: str) -> subprocess.Popen[str]:
        """Starts torchrun with so many workers of gpipe-train on one of the machines."""
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29500"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={workers}"]
        return self.start(side, [*launcher, *rendezvous, *TRAIN, *words])

    def srun(self, side: int, tasks: int, *words: str) -> list[subprocess.Popen[str]]:
        """Starts the tasks that Slurm's srun would start on one of the machines, with its variables."""
        step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "10.77.0.[1-2]"}
        step["SLURM_STEP_NUM_TASKS"] = str(2 * tasks)
        own = ({"SLURM_PROCID": str(side * tasks + task), "SLURM_LOCALID": str(task)} for task in range(tasks))
        return [self.start(side, [sys.executable, *TRAIN, *words], **step, **each) for each in own]

    def close(self) -> None:
        for name in self.names:
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for process in inside.stdout.split():
                subprocess.run(["kill", "-9", process], capture_output=True, check=False)
            _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


# -- ranks of launchers ----------------------------------------------------------------------------------------------


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


def test_all_ranks_refuse_a_run_directory_that_one_cannot_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- workers and GPUs of a machine -----------------------------------------------------------------------------------


PIPELINE = PipelineConfig(**{**composed()["pipeline"], "K": 16, "cost": "flops", "threads": 1}, auto=[])


@pytest.mark.parametrize(
    ("changes", "machine", "workers", "line"),
    [
        ({}, (0, 2), 2, "16 cells on 2 workers (2 cores)"),
        ({"K": 4}, (8, 2), 4, "4 cells on 4 workers (8 GPUs)"),
        ({"replicas": 4}, (8, 2), 2, "16 cells on 2 workers × 4 replicas (8 GPUs)"),
        ({"replicas": 4}, (0, 2), 1, "16 cells on 1 worker × 4 replicas (2 cores)"),
        ({"threads": 4}, (0, 8), 2, "16 cells on 2 workers (8 cores)"),
        ({"workers": 16}, (0, 2), 16, "16 cells on 16 workers (pipeline.workers=16)"),
        ({"schedule": "interleaved_1f1b"}, (0, 7), 4, "16 cells on 4 workers (7 cores)"),
    ],
)
def test_workers_follow_the_devices(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], machine: tuple[int, int], workers: int, line: str
) -> None:
    monkeypatch.setattr(configuration, "count_gpus", lambda: machine[0])
    monkeypatch.setattr(configuration, "usable_cores", lambda: machine[1])
    assert choose_workers(replace(PIPELINE, **changes), inline=False, world_size=None) == (workers, line)


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({"workers": 3}, 4, "WORLD_SIZE=4 does not fit pipeline.workers=3"),
        ({"replicas": 3}, 4, "pipeline.replicas=3 and pipeline.K=16"),
        ({"K": 2}, 4, "start torchrun with pipeline.replicas times 1 to 2 processes$"),
        ({"schedule": "interleaved_1f1b"}, 3, "a number that divides pipeline.K"),
    ],
)
def test_a_job_of_the_wrong_size_is_refused(changes: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose_workers(replace(PIPELINE, **changes), inline=False, world_size=world_size)


@pytest.mark.parametrize(
    ("visible", "number"),
    [("0,1", 2), ("", 0), ("-1", 0), ("2", 1), ("0,1,2,3,4,5", 4), ("7", 0), ("NoDevFiles", 0), ("GPU-a,MIG-b", 2)],
)
def test_gpus_are_those_that_cuda_programs_see(visible: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NoDevFiles is what Slurm gives to a job without GPUs; a worker would take one more for a driver that fails."""
    monkeypatch.setattr(gpus, "_installed_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.count_gpus() == number
