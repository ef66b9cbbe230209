"""Runs one rank of a job that torchrun, srun, or any launcher that sets RANK and WORLD_SIZE, has started."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpipe_cli.cpu import compile_environment
from gpipe_cli.errors import ConfigurationError, visible
from gpipe_cli.launch import report
from gpipe_cli.launch.context import Context, EntryFunction, call_entry
from gpipe_cli.launch.stop import StopSignals
from gpipe_cli.launch.supervisor import OnEvent
from gpipe_cli.launch.zygote import leave
from gpipe_cli.parent import die_with_parent

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_TIMEOUT_SECONDS = 300

_PORTS = range(20_000, 30_000)  # below those that systems give to outgoing connections
_FIRST_HOST = re.compile(r"(?P<name>[^\[,]+)(?:\[(?P<number>[0-9]+)[^\]]*\](?P<rest>[^,\[]*))?")

_job_numbers = itertools.count()


def joined() -> bool:
    """Returns whether this process was started as one rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(main: EntryFunction, config: dict[str, Any], run_dir: Path, on_event: OnEvent) -> Any:
    """Runs the entry point as the rank of the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK …).

    Several jobs of one process (a sweep) are distinguished by their order, which is the same in every rank. torch's
    number of threads stays as it is: torchrun sets OMP_NUM_THREADS.

    A rank that does not stop when it is asked to is killed by its launcher.

    An exception of the entry point, or from connecting to the others, is printed and ends this process at once with
    exit code 1: exit handlers may wait for peers that wait for this rank.

    Returns:
        What the entry point returned on this rank.

    Raises:
        KeyboardInterrupt, SystemExit: the run ended early because it was asked to.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(compile_environment(int(os.environ.get("LOCAL_WORLD_SIZE", world_size))) | os.environ)
    # Only torchrun is known to outlive its ranks. A script may start them in the background and end; srun and mpirun
    # end what they have started; otherwise a rank fails at its next message to one that is gone.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    from torch.distributed import PrefixStore  # slow

    store_prefix = f"start{restart_count()}/job{next(_job_numbers)}"  # torchrun's store outlives a restart
    signals = StopSignals()
    context = Context(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank(),
        run_dir=run_dir.absolute(),
        open_store=lambda: PrefixStore(store_prefix, _base_store()),
        emit=lambda event: on_event({"rank": rank, **event}),
        stop_requested=lambda: bool(signals.received),
    )
    with signals:
        try:
            value = call_entry(main, context, config, threads=None)
        except BaseException as error:
            _fail(context, error)
    if interruption := signals.interruption():
        raise interruption
    return value


def check_rank(environment: Mapping[str, str], trains: bool) -> int:
    """Refuses a launcher's variables if some of them are missing; returns 0.

    Args:
        trains: True also refuses several processes without RANK or WORLD_SIZE: each would train alone.

    Raises:
        ConfigurationError: it names the variables.
    """
    sizes = {environment.get(name) or "1" for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")}
    alone = not trains or ("RANK" not in environment and sizes == {"1"})
    if alone and not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return 0
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [f"{name} is not set" for name in needed if not environment.get(name)]:
        there = " and ".join(name for name in (*needed[:2], "OMPI_COMM_WORLD_SIZE") if name in environment)
        raise ConfigurationError(
            f"by {there} this process is one of a job, but {', '.join(missing)}: start it by torchrun or srun, or "
            f"unset {there} to run alone"
        )
    return 0


def local_rank() -> int:
    """Returns the number of this process on its machine; 0 if no launcher sets it.

    Slurm's variable comes last, because all processes of an mpirun in a batch script inherit the script's.
    """
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), 0)


def restart_count() -> int:
    """Returns how often torchrun has restarted its processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@functools.cache
def _base_store() -> Store:
    """Opens the ranks' store, once per process: a second rendezvous would find the first job's addresses."""
    from torch.distributed import DistNetworkError
    from torch.distributed.rendezvous import rendezvous

    store: Store
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=STORE_TIMEOUT_SECONDS))))
    except DistNetworkError as error:
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        raise ConfigurationError(
            f"the ranks cannot meet on port {port} of {host} ({str(error).splitlines()[0]}): where another program has "
            "the port, type MASTER_PORT=N, or srun --resv-ports"
        ) from error
    return store


def _fail(context: Context, error: BaseException) -> NoReturn:
    """Prints the error and ends this process with code 1, even if printing fails."""
    try:
        print(visible(report.in_short(report.failure_of(context.rank, error, context.where.known()))), file=sys.stderr)
    finally:
        leave(1)


# -- tasks of Slurm's srun, as torchrun would start them: `srun -n 8 gpipe-train …` ------------------------------------


def adopt_step(environment: MutableMapping[str, str]) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of an srun with several tasks.

    Variables that are set stay, as by torchrun inside srun or by a batch script. Nothing is set outside a step (a batch
    script has SLURM_PROCID, too), nor in a step of one task, which is a command that starts its own workers.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or "OMPI_COMM_WORLD_RANK" in environment or not tasks.isdecimal() or int(tasks) < 2:
        return
    if "SLURM_PROCID" not in environment or not (nodes := environment.get("SLURM_STEP_NODELIST")):
        return
    environment["RANK"], environment["WORLD_SIZE"] = environment["SLURM_PROCID"], tasks
    environment.setdefault("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
    environment.setdefault("MASTER_ADDR", first_host(nodes))
    reserved = environment.get("SLURM_STEP_RESV_PORTS", "").partition("-")[0].partition(",")[0]
    step = int(environment.get("SLURM_JOB_ID", "0")) * 16 + int(environment.get("SLURM_STEP_ID", "0"))
    environment.setdefault("MASTER_PORT", reserved or str(_PORTS[step % len(_PORTS)]))


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list, where rank 0 runs: gpu003 of "gpu[003-007,012],login1"."""
    found = _FIRST_HOST.match(nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes
