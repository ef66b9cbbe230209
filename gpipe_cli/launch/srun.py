"""Makes a task of Slurm's srun one rank of a job, as torchrun would: `srun -n 8 gpipe-train …`."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

_PORTS = range(20_000, 30_000)  # below those that systems give to outgoing connections
_FIRST_HOST = re.compile(r"(?P<name>[^\[,]+)(?:\[(?P<number>[0-9]+)[^\]]*\](?P<rest>[^,\[]*))?")


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
    step = int(environment.get("SLURM_JOB_ID", "0")) * 16 + int(environment.get("SLURM_STEP_ID", "0"))
    environment.setdefault("MASTER_PORT", str(_PORTS[step % len(_PORTS)]))


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list, as "gpu[003-007,012],login1": gpu003. Rank 0 runs there."""
    found = _FIRST_HOST.match(nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes
