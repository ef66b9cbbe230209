"""Defines tiny jobs for test_launch.py: entry points of workers, and, as a script, a command that launches them.

python launch_jobs.py ENTRY WORKERS RUN_DIR [key=value of Job, as JSON ...]

Where RANK is set it is one rank; ENTRY may be several then, with commas between.
"""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch.context import Context
from gpipe_cli.launch.join import join, joined
from gpipe_cli.launch.supervisor import Job, WorkerFailed, launch

CULPRIT = 1


def _ready(context: Context) -> None:
    context.emit({"event": "ready", "pid": os.getpid(), "parent": os.getppid()})


def _sleep_as_peer(context: Context) -> None:
    """Sleeps, on every rank but the culprit, for longer than any test waits."""
    _ready(context)
    if context.rank != CULPRIT:
        time.sleep(120)
    time.sleep(0.1)


def _joined(context: Context) -> Any:
    """Returns torch, which only some jobs import, when all ranks have joined their group."""
    import torch

    context.init_process_group()
    torch.distributed.barrier()
    return torch


def describe(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    print("a line from C-level stdout", flush=True)
    context.emit({"event": "hello", "text": "line\nbreak"})
    threads, helpers = os.environ["OMP_NUM_THREADS"], os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    found = {"cwd": str(Path.cwd()), "threads": threads, "helpers": helpers, "sys_path": sys.path}
    return {"rank": context.rank, "world_size": context.world_size, "config": config, **found}


def deadlock(context: Context, config: dict[str, Any]) -> None:
    """Waits, on every rank, for a message that no rank sends."""
    torch = _joined(context)
    _ready(context)
    context.where.enter(context.rank, 0, "receive_activation")
    torch.distributed.recv(torch.zeros(1), (context.rank + 1) % context.world_size)


def fail_beside_recv(context: Context, config: dict[str, Any]) -> None:
    """One rank raises while its peers wait inside gloo for it."""
    torch = _joined(context)
    if context.rank == CULPRIT:
        context.where.enter(1, 2, "forward")
        context.where.layer = "encoder.3"
        raise ValueError("the real cause")
    torch.distributed.recv(torch.zeros(1), CULPRIT)


def raise_value_error(context: Context, config: dict[str, Any]) -> None:
    _sleep_as_peer(context)
    raise ValueError("the real cause")


def fail_on_full_disk(context: Context, config: dict[str, Any]) -> None:
    from small_disk import fill  # imports pytest

    _sleep_as_peer(context)
    fill(Path(config["fill"]))
    print("a line that finds no room", flush=True)
    raise OSError(errno.ENOSPC, "No space left on device", "/shared/x")


def sleep(context: Context, config: dict[str, Any]) -> None:
    """Ignores requests to stop, with a child process in each worker."""
    subprocess.Popen(["sleep", "120"])
    _ready(context)
    time.sleep(120)


def prepare_data(context: Context, config: dict[str, Any]) -> list[float]:
    """Prepares data as the trainer does, by replicas of two workers, where a message may take 2 s.

    Args:
        config: "seconds" that each preparation takes.

    Returns:
        When each rank began to prepare; 0 for one that reads no data.
    """
    from gpipe_cli.distributed.world import join_world
    from gpipe_cli.trainer.batches import prepare_in_turn

    began = 0.0

    class Slow:
        def prepare(self, report: Any) -> None:
            nonlocal began
            began = time.time()
            _ready(context)
            time.sleep(config["seconds"])

    context.init_process_group = partial(context.init_process_group, timeout_seconds=2.0)  # type: ignore[method-assign]
    world = join_world(context, 2, context.world_size // 2, "cpu", "gloo")
    prepare_in_turn(Slow() if world.reads_data else None, world, lambda text, done, total: None)
    return world.all_gather(began)


def meet_and_wait(context: Context, config: dict[str, Any]) -> None:
    """Joins the world as the trainer does, uses all of its groups, and waits for the request to stop."""
    import torch

    from gpipe_cli.distributed.pipeline import make_transport
    from gpipe_cli.distributed.world import Exchange, join_world
    from gpipe_cli.pipeline.gradients import sum_over_replicas

    world = join_world(context, 2, context.world_size // 2, "cpu", "auto")
    make_transport(world, (0, 1))
    exchange = Exchange({"met": 1}, world.all_ranks)
    exchange.run()
    assert world.replica_group is not None
    sum_over_replicas(torch.ones(8), world.replica_group)
    assert world.all_gather(context.rank) == list(range(context.world_size))
    _ready(context)
    while not context.stop_requested():
        time.sleep(0.02)


def run_until_stopped(context: Context, config: dict[str, Any]) -> str:
    """Stops when rank 0 is asked to; a file carries its decision to the others."""
    _ready(context)
    if context.rank == 0:
        while not context.stop_requested():
            time.sleep(0.02)
        (context.run_dir / "decision").write_text("stop")
        (context.run_dir / "saved").write_text("yes")
    while not (context.run_dir / "decision").exists():
        time.sleep(0.02)
    return "stopped in order"


def exchange_until_stopped(context: Context, config: dict[str, Any]) -> str:
    """Stops as the trainer does: the exchange of each step tells all that one was asked to."""
    torch = _joined(context)
    _ready(context)
    stop = torch.zeros(1)
    while not stop.item():
        stop.fill_(float(context.stop_requested()))
        torch.distributed.all_reduce(stop)
        time.sleep(0.02)
    (context.run_dir / f"saved_{context.rank}").write_text("yes")
    return "stopped in order"


def stop_and_fail(context: Context, config: dict[str, Any]) -> None:
    _ready(context)
    while not context.stop_requested():
        time.sleep(0.02)
    raise OSError("disk full")


def use_pool(context: Context, config: dict[str, Any]) -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as pool:  # leaving the block terminates it by SIGTERM
        return pool.map(abs, [-1, -2])


def emit_many(context: Context, config: dict[str, Any]) -> int:
    for number in range(config["events"]):
        context.emit({"event": "many", "number": number, "padding": "x" * 1000})
    return config["events"]


def _print_event(event: dict[str, Any]) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")  # in one piece: under torchrun two ranks share a pipe


def main() -> None:
    entry, workers, run_dir, *options = sys.argv[1:]
    settings = {key: json.loads(value) for key, value in (option.split("=", 1) for option in options)}
    config = settings.pop("config", {})
    if joined():
        for job_number, one in enumerate(entry.split(",")):
            value = join(resolve_name(f"launch_jobs:{one}"), config, Path(run_dir) / str(job_number), _print_event)
            _print_event({"event": "result", "rank": int(os.environ["RANK"]), "value": value})
        return
    job = Job(Path(run_dir), int(workers), f"launch_jobs:{entry}", config, **settings)
    try:
        result = launch(job, _print_event)
    except (WorkerFailed, ConfigurationError) as failure:
        print(failure, file=sys.stderr)
        sys.exit(2 if isinstance(failure, ConfigurationError) else 1)
    _print_event({"event": "result", "value": result})


if __name__ == "__main__":
    main()
