"""Imitates two machines on this one: network namespaces with a slow link, and file systems of their own.

Both see the folder `shared`; each has its own `local` (its HOME), /dev/shm, host name, hosts file and boot id.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "tbf rate 400mbit burst 256kb latency 200ms"
SETUP = """
set -e
mount --make-rprivate /
mount --bind {own} {local}
mount -t tmpfs tmpfs /dev/shm
mount --bind {own}/boot_id /proc/sys/kernel/random/boot_id
mount --bind {own}/hosts /etc/hosts
hostname {name}
cd {local}
exec "$@"
"""


def permitted() -> bool:
    """Returns whether this process may make namespaces with devices, as root can outside of most containers."""
    script = "ip link add gp0 type veth peer name gp1 && mount -t tmpfs tmpfs /mnt"
    done = subprocess.run(["unshare", "--net", "--mount", "--uts", "sh", "-c", script], capture_output=True)
    return done.returncode == 0


class TwoMachines:
    """Holds two network namespaces that are connected; `close` removes them.

    Args:
        folder: for their files.
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
        return subprocess.Popen(
            [*words, *command],
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def torchrun(self, side: int, workers: int, *words: str) -> subprocess.Popen[str]:
        """Starts torchrun with so many workers of gpipe-train on one of the machines."""
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29500"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={workers}"]
        return self.start(side, [*launcher, *rendezvous, "-m", "gpipe_cli.commands.train", *words])

    def srun(self, side: int, tasks: int, *words: str) -> list[subprocess.Popen[str]]:
        """Starts the tasks that Slurm's srun would start on one of the machines, with its variables."""
        common = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(2 * tasks)}
        return [
            self.start(
                side,
                [sys.executable, "-m", "gpipe_cli.commands.train", *words],
                SLURM_PROCID=str(side * tasks + task),
                SLURM_LOCALID=str(task),
                SLURM_STEP_NODELIST="10.77.0.[1-2]",
                **common,
            )
            for task in range(tasks)
        ]

    def close(self) -> None:
        for name in self.names:
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for process in inside.stdout.split():
                subprocess.run(["kill", "-9", process], capture_output=True, check=False)
            _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
