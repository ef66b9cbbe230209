"""Tests that workers start, report, stop and die as promised, leave no process behind, and let no stranger in.

The cases are those that other launchers were seen to fail: see docs/design.md, "Launch".
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import launch_jobs
import pytest
import torch
from launch_command import Command, children_of, free_port, wait_for
from processes import run, succeeded
from small_disk import small_disk
from torch.distributed import DistBackendError

from gpipe_cli.cpu import usable_cores
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch import report
from gpipe_cli.launch.join import adopt_step
from gpipe_cli.launch.stop import StopSignals
from gpipe_cli.launch.supervisor import ZYGOTE, Job, WorkerFailed, launch
from gpipe_cli.parent import child_command

LOADS = """if True:
    import torch
    from torch.utils.data import DataLoader
    from gpipe_cli.launch.report import failure_of
    try:
        list(DataLoader(torch.zeros(8, 1 << 20), num_workers=1, batch_size=4))
    except RuntimeError as error:
        print(failure_of(0, error, {}).text)
"""


@pytest.fixture
def command(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Starts `command("entry", workers, **fields of Job)`."""
    started: list[Command] = []

    def start(entry: str, workers: int = 3, prefix: tuple[str, ...] = (), **job: Any) -> Command:
        options = [f"{key}={json.dumps(value)}" for key, value in job.items()]
        run_dir = tmp_path / f"job{len(started)}"
        run_dir.mkdir()
        started.append(Command(run_dir, entry, str(workers), str(run_dir), *options, prefix=prefix))
        return started[-1]

    yield start
    for one in started:
        one.clean_up()


# ---------------------------------------------------------------------------------------------- a run that goes well


def test_rank_0_returns_its_value_and_sees_the_commands_directory_and_modules(command: Any) -> None:
    started = command("describe", config={"K": 3, "name": "ü"}, threads=2)
    *hello, result = list(started.events())
    assert started.end()[0] == 0
    assert sorted(event["rank"] for event in hello) == [0, 1, 2]
    assert hello[0]["text"] == "line\nbreak"
    value = result["value"]
    assert value["rank"] == 0 and value["world_size"] == 3 and value["config"] == {"K": 3, "name": "ü"}
    assert value["cwd"] == str(Path.cwd()) and value["threads"] == "2"
    assert value["helpers"] == str(max(1, usable_cores() // 3))  # of each worker's torch.compile
    assert value["sys_path"][0] == str(Path(launch_jobs.__file__).parent)
    assert "a line" in (started.run_dir / "workers" / "rank_2.log").read_text()


def test_sixteen_workers_import_the_preloaded_modules_once(command: Any, tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('once ')\n")
    started = command("describe", 16, preload=["counted"])
    *hello, _ = started.events()
    assert started.end()[0] == 0
    assert len(hello) == 16
    assert (tmp_path / "imports").read_text() == "once "


def test_a_worker_may_use_a_multiprocessing_pool(command: Any) -> None:
    started = command("use_pool", 1)
    assert list(started.events())[-1]["value"] == [1, 2]
    assert started.end()[0] == 0


def test_a_console_that_does_not_read_holds_no_worker_up(tmp_path: Path) -> None:
    numbers: list[int] = []

    def slow(event: dict[str, Any]) -> None:
        if not numbers:
            time.sleep(1)  # meanwhile the workers' sockets are full
        numbers.append(event["number"])

    launch(Job(tmp_path, 1, "launch_jobs:emit_many", {"events": 2000}), slow)
    assert numbers == list(range(2000))


# ------------------------------------------------------------------------------------------------- a worker fails


def test_the_error_names_its_place_in_the_pipeline_and_the_log(command: Any) -> None:
    started = command("fail_beside_recv", preload=["torch"])
    code, errors = started.end()
    assert code == 1
    assert "worker 1 failed at cell 1, layer encoder.3, micro-batch 2, forward:" in errors
    assert "ValueError: the real cause" in errors
    assert errors.rstrip().endswith(f"log: {started.run_dir}/workers/rank_1.log")
    assert "gloo" not in errors  # the errors of the peers that waited


@pytest.mark.parametrize(
    ("entry", "options", "cause"),
    [
        ("raise_value_error", "size=16k", "ValueError: the real cause"),
        ("fail_on_full_disk", "size=16k", "shared/x cannot be written: No space"),
        ("raise_value_error", "nr_inodes=3", "log cannot be written: No space left"),
    ],
)
def test_the_cause_arrives_where_nothing_can_be_written(entry: str, options: str, cause: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "workers", options), pytest.raises(WorkerFailed, match=cause):
        (tmp_path / "workers" / "job.json").touch()
        job = Job(tmp_path, 2, f"launch_jobs:{entry}", {"fill": str(tmp_path / "workers")})
        launch(job, lambda event: None)


def test_echoes_of_a_peers_end_are_told_from_causes() -> None:
    echo, wrapped = RuntimeError("[third_party/gloo/pair.cc:534] Connection closed by peer"), LookupError("cell 1")
    wrapped.__cause__ = echo
    assert [report.suspicion(error) for error in (ValueError("x"), wrapped, echo)] == [0, 1, 2]
    own = "NCCL error: unhandled system error. Error while creating shared memory segment /dev/shm/nccl-1: No space"
    far = "NCCL error: remote process exited or there was a network error"
    assert [report.suspicion(DistBackendError(text)) for text in (own, far)] == [1, 2]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "remat=always.* pipeline.keep.* pipeline.M.* plan.fit"),
        (RuntimeError("CUDA error: device-side assert triggered"), "token or label .* pipeline.device=cpu name"),
        (RuntimeError("cumsum does not have a deterministic implementation"), "precision.deterministic=false"),
        (DistBackendError("NCCL error: no room in /dev/shm/nccl-1"), "--shm-size"),
        (
            ConfigurationError("layer 'x': Expected more than 1 value per channel"),
            "lower pipeline.M or raise data.batch",
        ),
    ],
)
def test_an_error_that_says_too_little_ends_with_what_to_do(error: Exception, advice: str) -> None:
    around = LookupError("cell 1, layer 'head'")
    around.__cause__ = error
    assert re.search(advice, report.failure_of(0, around, {}).text.splitlines()[-1])


def test_loader_processes_without_shared_memory_are_one_line(tmp_path: Path) -> None:
    inside = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} -c '{LOADS}'"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs root, and a mount namespace")
    said = succeeded(run("unshare", "--mount", "sh", "-c", inside))
    assert "--shm-size=8g" in said and "data.workers=0" in said and said.count("\n") == 1


# ---------------------------------------------------------------------------------------- processes that are killed


@pytest.mark.parametrize(("entry", "preload"), [("sleep", []), ("deadlock", ["torch"])])
def test_nothing_survives_a_killed_command(command: Any, entry: str, preload: list[str]) -> None:
    started = command(entry, 2, preload=preload)
    started.wait_until_ready(2)
    started.process.kill()
    assert started.end()[0] == -signal.SIGKILL


def test_nothing_survives_a_command_that_is_killed_while_its_starter_is_stopped(command: Any) -> None:
    started = command("sleep", 2)
    started.wait_until_ready(2)
    os.kill(started.ready[0]["parent"], signal.SIGSTOP)
    started.process.kill()
    assert started.end()[0] == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["the interpreter starts", "modules are imported", "the workers start"])
def test_nothing_survives_a_command_killed_while_its_job_starts(command: Any, tmp_path: Path, moment: str) -> None:
    """An import that takes longer than a process may outlive its command stands for torch on a busy machine."""
    marker = tmp_path / "importing"
    (tmp_path / "slow_to_import.py").write_text(f"import os, time\nos.mkdir({str(marker)!r})\ntime.sleep(120)\n")
    started = command("deadlock", preload=["torch" if moment == "the workers start" else "slow_to_import"])
    (starter,) = wait_for(lambda: children_of(started.process.pid))
    if moment == "the interpreter starts":  # it is stopped there, and goes on when the command has been killed
        os.kill(starter, signal.SIGSTOP)
    elif moment == "modules are imported":
        wait_for(marker.exists)
    else:
        wait_for(lambda: children_of(starter))
    started.process.kill()
    started.process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(starter, signal.SIGCONT)
    started.end()


def test_a_killed_starter_ends_the_job(command: Any) -> None:
    started = command("sleep")
    started.wait_until_ready(3)
    os.kill(started.ready[0]["parent"], signal.SIGKILL)
    code, errors = started.end()
    assert code == 1
    assert "the process that starts the workers was killed by SIGKILL" in errors


# -------------------------------------------------------------------------------------------------- asked to stop


SIGNALS = [
    (signal.SIGINT, -2),
    (signal.SIGTERM, 143),
    (signal.SIGHUP, 129),
    (signal.SIGUSR1, 138),
    (signal.SIGUSR2, 140),
]


@pytest.mark.parametrize(("number", "expected"), SIGNALS, ids=lambda value: getattr(value, "name", ""))
def test_the_first_signal_lets_the_run_save_and_end(command: Any, number: signal.Signals, expected: int) -> None:
    started = command("run_until_stopped")
    started.wait_until_ready(3)
    os.killpg(started.process.pid, number)
    assert next(started.events()) == {"event": "stopping", "signal": number.name, "grace_seconds": Job.grace_seconds}
    assert started.end()[0] == expected
    assert (started.run_dir / "saved").exists()


def test_a_deadlocked_job_is_killed_after_the_grace_period(command: Any) -> None:
    started = command("deadlock", preload=["torch"], grace_seconds=1.0)
    started.wait_until_ready(3)
    started.press_ctrl_c()
    assert [event["event"] for event in started.events()] == ["stopping", "killed"]
    assert started.end()[0] == -signal.SIGINT


def test_a_second_ctrl_c_ends_the_job_at_once(command: Any) -> None:
    started = command("deadlock", preload=["torch"], grace_seconds=60.0)
    started.wait_until_ready(3)
    started.press_ctrl_c()
    assert next(started.events())["event"] == "stopping"
    started.press_ctrl_c()
    assert started.end()[0] == -signal.SIGINT  # `end` waits for less than the grace period


def test_ctrl_z_stops_the_workers_too_and_they_continue_together(command: Any) -> None:
    started = command("run_until_stopped", 2)
    started.wait_until_ready(2)
    workers = [event["pid"] for event in started.ready]

    def stopped(*processes: int) -> list[bool]:
        return [Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T" for process in processes]

    os.kill(started.process.pid, signal.SIGTSTP)
    wait_for(lambda: all(stopped(*workers, started.process.pid)))
    os.kill(started.process.pid, signal.SIGCONT)
    wait_for(lambda: not any(stopped(*workers, started.process.pid)))
    started.press_ctrl_c()
    assert started.end()[0] == -signal.SIGINT and (started.run_dir / "saved").exists()


def test_ctrl_c_works_where_a_script_has_put_the_command_in_the_background(command: Any) -> None:
    started = command("run_until_stopped", 1, prefix=("sh", "-c", 'trap "" INT HUP; exec "$@"', "sh"))
    started.wait_until_ready(1)
    os.kill(started.process.pid, signal.SIGHUP)  # ignored: nohup
    os.kill(started.process.pid, signal.SIGINT)
    assert next(started.events())["signal"] == "SIGINT"
    started.end()
    assert (started.run_dir / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_workers_outlive_a_signal_that_a_batch_system_sends_to_every_process(command: Any, number: int) -> None:
    started = command("run_until_stopped", 2)
    started.wait_until_ready(2)
    for process in (*(event["pid"] for event in started.ready), started.ready[0]["parent"], started.process.pid):
        os.kill(process, number)
    assert started.end()[0] == 128 + number
    assert (started.run_dir / "saved").exists()


def test_a_handler_of_the_batch_system_s_runs_when_all_is_saved() -> None:
    called = []
    before = signal.signal(signal.SIGUSR2, lambda *_: called.append("queued again"))
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGUSR2)
            assert not called
        assert isinstance(signals.interruption(), SystemExit) and called == ["queued again"]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_failure_while_stopping_is_told(command: Any) -> None:
    started = command("stop_and_fail", 1)
    started.wait_until_ready(1)
    started.press_ctrl_c()
    code, errors = started.end()
    assert code == -signal.SIGINT
    assert "OSError: disk full" in errors


# ------------------------------------------------------------------------------------------------- under torchrun

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python")


@pytest.mark.slow
def test_ranks_of_torchrun_die_with_it(command: Any) -> None:
    started = command("deadlock", prefix=TORCHRUN)
    started.wait_until_ready(2)
    started.process.kill()
    assert started.end()[0] == -signal.SIGKILL


@pytest.mark.slow
def test_a_signal_to_another_rank_than_0_lets_all_save_and_end(command: Any) -> None:
    started = command("exchange_until_stopped", prefix=TORCHRUN)
    (started.run_dir / "0").mkdir()
    started.wait_until_ready(2)
    os.kill(next(event["pid"] for event in started.ready if event["rank"] == 1), signal.SIGTERM)
    started.end()
    assert sorted(path.name for path in (started.run_dir / "0").glob("saved_*")) == ["saved_0", "saved_1"]


def by_hand(port: int, rank: int = 0, world_size: int = 1) -> tuple[str, ...]:
    """Returns the words with which a user starts a rank without a launcher."""
    return ("env", f"RANK={rank}", f"WORLD_SIZE={world_size}", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}")


def test_of_ranks_without_a_supervisor_only_the_one_that_failed_prints_a_traceback(command: Any) -> None:
    port = free_port()
    ranks = [command("fail_beside_recv", prefix=by_hand(port, rank, world_size=2)) for rank in (0, 1)]
    for rank in ranks:
        (rank.run_dir / "0").mkdir()
    (echo_code, echo), (code, cause) = [rank.end() for rank in ranks]
    assert (echo_code, code) == (1, 1)
    assert echo.startswith("worker 0 failed: ") and "the worker that failed first prints the cause" in echo
    assert "Connection closed by peer" in echo or "Connection reset by peer" in echo
    assert echo.count("\n") == 1
    assert cause.startswith("worker 1 failed at cell 1,") and cause.endswith("ValueError: the real cause\n")


def test_a_port_of_slurm_that_is_taken_is_one_line_that_says_what_to_type(command: Any) -> None:
    task = {"SLURM_JOB_ID": "100", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    adopt_step(task := {**task, "SLURM_STEP_NODELIST": "127.0.0.1"})
    with socket.create_server(("", int(task["MASTER_PORT"]))):
        started = command("exchange_until_stopped", prefix=("env", *map("=".join, task.items())))
        (started.run_dir / "0").mkdir()
        code, said = started.end()
    assert code == 1 and "cannot meet on port 21603 of 127.0.0.1" in said and "MASTER_PORT=N" in said


# -- the door: another user of the machine finds no ports and no names -----------------------------------------------


INTERNET = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")


def sockets_of(folder: Path) -> set[str]:
    """Returns the inodes of a process's sockets."""
    links = []
    with suppress(OSError):  # the process, or one of its descriptors, is gone
        for entry in (folder / "fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(str(entry.readlink()))
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}


def table(name: str) -> list[list[str]]:
    """Returns the rows of a table of the kernel's sockets."""
    path = Path("/proc/net") / name
    return [row.split() for row in path.read_text().splitlines()[1:]] if path.exists() else []


def test_no_socket_of_a_job_is_of_the_internet_or_has_a_name(command: Any) -> None:
    """... of two workers and two replicas, which have used every way to talk to each other."""
    started = command("meet_and_wait", 4, preload=["torch"])
    started.wait_until_ready(4)
    processes = started.processes()
    assert len(processes) == 6  # the command, the zygote, four workers
    ours = set().union(*map(sockets_of, processes))
    assert not ours & {row[9] for name in INTERNET for row in table(name)}
    names = {row[6]: row[7:] for row in table("unix")}
    assert len(ours & names.keys()) > 10 and not any(names[inode] for inode in ours & names.keys())


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("open('code has run', 'w')")
    done = subprocess.run(child_command(ZYGOTE), cwd=tmp_path, input=b"{}", capture_output=True)
    assert b"control" in done.stderr  # of the job, which is empty here
    assert not (tmp_path / "code has run").exists()
