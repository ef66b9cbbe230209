"""Runs one rank of a job that torchrun, srun, or any launcher that sets RANK and WORLD_SIZE, has started."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpipe_cli.cpu import compile_helpers
from gpipe_cli.errors import ConfigurationError, visible
from gpipe_cli.launch import report
from gpipe_cli.launch.context import GROUP_TIMEOUT_SECONDS, Context, call_entry, show_crashes
from gpipe_cli.launch.stop import StopSignals
from gpipe_cli.launch.supervisor import OnEvent
from gpipe_cli.launch.zygote import leave
from gpipe_cli.parent import die_with_parent

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_TIMEOUT_SECONDS = 300
POLL_SECONDS = 2.0
CONNECT_SECONDS = 0.1  # between two looks for rank 0's store
SETTLE_SECONDS = 5.0  # in which this rank may fail by itself and name a better cause
SILENT_ROUNDS = 60  # of POLL_SECONDS, after which a rank or store on another machine counts as gone

_PORTS = range(20_000, 30_000)  # below those that systems give to outgoing connections
_TRIED, _APART = 16, 1009  # ports that a step of Slurm may take, and how far they lie apart
_OWNER = "step of Slurm"  # the key of a store that names its step
_FIRST_HOST = re.compile(r"(?P<name>[^\[,]+)(?:\[(?P<number>[0-9]+)[^\]]*\](?P<rest>[^,\[]*))?")

_job_numbers = itertools.count()


def joined() -> bool:
    """Returns whether this process was started as one rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(entry: str, config: dict[str, Any], run_dir: Path, on_event: OnEvent) -> Any:
    """Runs the entry point as the rank of the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK …).

    Several jobs of one process (a sweep) are distinguished by their order, which is the same in every rank. torch's
    number of threads stays as it is: torchrun sets OMP_NUM_THREADS.

    A rank that does not stop when it is asked to is killed by its launcher.

    Returns:
        what the entry point returned on this rank.

    Raises:
        KeyboardInterrupt, SystemExit: after a run that ended early because it was asked to.
        An exception of the entry point, or from connecting to the others, does not come through: it is recorded below
        `run_dir`/workers, printed, and ends the process at once with exit code 1, because exit handlers may wait for
        peers that wait for this rank.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(compile_helpers(int(os.environ.get("LOCAL_WORLD_SIZE", world_size))) | os.environ)
    # Only torchrun is known to outlive its ranks. A script may start them in the background and end; srun and mpirun
    # end what they have started; otherwise a rank fails at its next message to one that is gone.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    show_crashes()
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
            with PeerWatch(context.store, rank, world_size):
                value = call_entry(entry, context, config, threads=None)
        except BaseException as error:
            _fail(context, error)
    if interruption := signals.interruption():
        raise interruption
    return value


def check_rank(environment: Mapping[str, str], trains: bool) -> int:
    """Refuses a launcher's variables of which some are missing or wrong; returns 0.

    Args:
        trains: without RANK or WORLD_SIZE, too, each of several processes would train alone.

    Raises:
        ConfigurationError: it names the variables.
    """
    sizes = {environment.get(name) or "1" for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")}
    if not {"RANK", "WORLD_SIZE"} <= environment.keys() and not (trains and ("RANK" in environment or sizes != {"1"})):
        return 0
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    wrong = [f"{name}={environment[name]}" for name in names if not re.fullmatch("[0-9]+", environment.get(name, "0"))]
    if not wrong and int(environment.get("MASTER_PORT", 0)) >= 1 << 16:
        wrong = ["MASTER_PORT must be below 65536"]
    if not wrong and int(environment.get("RANK", 0)) >= int(environment.get("WORLD_SIZE", 1 << 32)):
        wrong = ["RANK must be below WORLD_SIZE"]
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    wrong += [f"{name} is not set" for name in needed if not environment.get(name)]
    if wrong:
        there = " and ".join(name for name in (*needed[:2], "OMPI_COMM_WORLD_SIZE") if name in environment)
        raise ConfigurationError(
            f"by {there} this process is one of a job, but {', '.join(wrong)}: start it by torchrun or srun, or unset "
            f"{there} to run alone"
        )
    return 0


def local_rank() -> int:
    """Returns the number of this process on its machine; 0 if no launcher sets it.

    Slurm's comes last: a batch script has one too, which all processes of an mpirun in it inherit.
    """
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), 0)


def restart_count() -> int:
    """Returns how often torchrun has restarted its processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def lasting_store() -> Store | None:
    """Returns a store that keeps its values when torchrun restarts its processes; None if a rank serves the store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    from torch.distributed import PrefixStore

    store = _base_store()
    while isinstance(store, PrefixStore):  # some releases of torch number the restarts by a prefix
        store = store.underlying_store
    return PrefixStore("gpipe", store)


@functools.cache
def _base_store() -> Store:
    """Opens one store per process: a second rendezvous would find the first job's addresses in it."""
    from torch.distributed.rendezvous import rendezvous

    if "SLURM_STEP_ID" in os.environ:
        ports = _ports_of_step(os.environ)
        if os.environ["MASTER_PORT"] == str(ports[0]):
            return _store_of_step(ports)
    store: Store
    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=STORE_TIMEOUT_SECONDS))))
    return store


def _fail(context: Context, error: BaseException) -> NoReturn:
    """Records the error, and always ends this process."""
    try:
        failure = report.failure_of(context.rank, error, context.where.known())
        print(visible(report.publish(context.run_dir / "workers", failure)), file=sys.stderr)
    except Exception:
        traceback.print_exc()
    finally:
        leave(1)


# -- the end of other ranks -------------------------------------------------------------------------------------------


class PeerWatch:
    """Watches the other ranks of a job from a thread, inside its `with` block, and ends this process after a death.

    A rank that waits for a dead one inside a GPU's call runs none of Python's signal handlers: its launcher would kill
    it, but only when the time for an ordered end is over. The kernel reports the end of the two neighbours that run on
    this machine; those on another, which may vanish whole, count rounds in the store, as this rank does for them. A key
    in the store tells all ranks. Silence is measured in rounds of this process, which may have been suspended too.

    Args:
        store: of this job alone.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._neighbours = {(rank + step) % world_size for step in (-1, 1)} - {rank}
        self._on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
        self._over = threading.Event()
        # Rounds since the store has answered; none while it may let a late rank be waited for.
        self._silence = -math.inf

    def __enter__(self) -> None:
        if self._neighbours and hasattr(os, "pidfd_open"):  # not in Linux before 5.3
            self._store.set(f"process {self._rank}", f"{os.getpid()} {_process_space()}")
            threading.Thread(target=self._run, args=(self._store.clone(),), daemon=True).start()
            if not self._on_one_machine:  # else torchrun serves the store, and may be paused from its terminal
                threading.Thread(target=self._watch_store, daemon=True).start()

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(RuntimeError):  # the store has ended
            self._store.set("gone" if kind else f"over {self._rank}", str(self._rank))
        self._over.set()

    def _run(self, store: Store) -> None:
        """Waits for a death and ends this process; the store's own end is the death of the rank that served it."""
        try:
            gone = self._wait_for_death(store)
        except RuntimeError:
            gone = "with the store"
        self._end(gone)

    def _watch_store(self) -> None:
        """Ends this process when the store does not answer: its machine may have vanished."""
        while self._silence <= SILENT_ROUNDS:
            if self._over.wait(POLL_SECONDS):
                return
            self._silence += 1
        self._end("with the store")

    def _end(self, gone: str | None) -> None:
        if gone is not None and not self._over.wait(SETTLE_SECONDS):
            text = f"worker {gone} has ended, so worker {self._rank} ends too: it waits in a call that does not return"
            print(text, file=sys.stderr)
            leave(1)

    def _wait_for_death(self, store: Store) -> str | None:
        """Returns the rank that has died; None once this rank's job is over."""
        store.set_timeout(timedelta(seconds=GROUP_TIMEOUT_SECONDS))
        ranks, ends, far = {}, select.poll(), dict[int, tuple[int, int]]()
        for rank in self._neighbours:
            process, space = store.get(f"process {rank}").decode().split(" ", 1)
            if space == _process_space():
                with suppress(ProcessLookupError):  # died already: others will see it in the store, or in a message
                    ranks[descriptor := os.pidfd_open(int(process))] = rank
                    ends.register(descriptor, select.POLLIN)
            else:
                far[rank] = 0, 0  # its rounds, and those of this rank since the last
        while not self._over.is_set():
            for descriptor, _ in ends.poll(1000 * POLL_SECONDS):
                ends.unregister(descriptor)
                os.close(descriptor)
                if not store.check([f"over {ranks[descriptor]}"]):
                    store.set("gone", str(ranks[descriptor]))
            if far:
                store.add(f"rounds {self._rank}", 1)
            for rank, (before, silence) in far.items():
                rounds = store.add(f"rounds {rank}", 0)
                far[rank] = rounds, silence + 1 if rounds == before > 0 else 0
                if silence == SILENT_ROUNDS and not store.check([f"over {rank}"]):
                    store.set("gone", str(rank))
            self._silence = 0
            if store.check(["gone"]):
                return store.get("gone").decode()
        return None


def _process_space() -> str:
    """Returns a text that is equal in processes which know each other by their process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


# -- tasks of Slurm's srun, as torchrun would start them: `srun -n 8 gpipe-train …` ------------------------------------


def adopt_step(environment: MutableMapping[str, str]) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of an srun with several tasks.

    What is set already stays: torchrun inside srun, or a batch script's own choice. A batch script has SLURM_PROCID too
    but no step, and a step of one task is one command that starts its own workers.
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
    environment.setdefault("MASTER_PORT", reserved or str(_ports_of_step(environment)[0]))


def _ports_of_step(environment: Mapping[str, str]) -> list[int]:
    """Returns the ports of which a step takes the first that is free."""
    step = int(environment.get("SLURM_JOB_ID", "0")) * 16 + int(environment.get("SLURM_STEP_ID", "0"))
    return [_PORTS[(step + number * _APART) % len(_PORTS)] for number in range(_TRIED)]


def _store_of_step(ports: Sequence[int]) -> Store:
    """Opens the store of this step: rank 0 serves it on the first free port, the others look where it is.

    Raises:
        TimeoutError: no port is free, or rank 0 is on none.
    """
    from torch.distributed import TCPStore

    host, step = os.environ["MASTER_ADDR"], f"{os.environ.get('SLURM_JOB_ID')}.{os.environ['SLURM_STEP_ID']}"
    serves, begun = os.environ["RANK"] == "0", time.monotonic()
    timeout = timedelta(seconds=STORE_TIMEOUT_SECONDS)
    while time.monotonic() - begun < STORE_TIMEOUT_SECONDS:
        for port in ports:
            with suppress(RuntimeError, OSError):  # taken; nothing listens there, or something else
                if serves:
                    store = TCPStore(host, port, None, True, timeout, wait_for_workers=False)
                    store.set(_OWNER, step)
                    return store
                found = _store_at(host, port)
                if found is not None and found.check([_OWNER]) and found.get(_OWNER).decode() == step:
                    found.set_timeout(timeout)
                    return found
        time.sleep(CONNECT_SECONDS)
    raise TimeoutError(f"no store of step {step} on {host} in {STORE_TIMEOUT_SECONDS} s: its ports are {ports}")


def _store_at(host: str, port: int) -> Store | None:
    """Connects to the store on a port; returns None where something else listens, which may never answer.

    Raises:
        OSError: nothing listens there; TCPStore would wait.
    """
    from torch.distributed import TCPStore

    socket.create_connection((host, port), POLL_SECONDS).close()
    found: list[Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            found.append(TCPStore(host, port, None, False, timedelta(seconds=SETTLE_SECONDS), wait_for_workers=False))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SETTLE_SECONDS)
    return found[0] if found else None


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list, as "gpu[003-007,012],login1": gpu003. Rank 0 runs there."""
    found = _FIRST_HOST.match(nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes
