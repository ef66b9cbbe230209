"""Tests that processes use the CPU as promised: cores, threads, freed memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memory_limit import memory_limit

from gpipe_cli import cpu
from gpipe_cli.cpu import free_memory, torch_threads, usable_cores, usable_memory

FAULTS_OF_A_STEP = """
import resource, torch
from gpipe_cli.cpu import keep_freed_memory

def step():
    activations = [torch.ones(1 << 20) for _ in range(16)]  # 4 MiB each, all alive at once

def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
for _ in range(6):  # until the heap has taken its shape
    step()
before = page_faults()
for _ in range(4):
    step()
print((page_faults() - before) // 4)
"""


def page_faults_of_a_step(**environment: str) -> int:
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    output = subprocess.check_output([sys.executable, "-c", FAULTS_OF_A_STEP], env=others | environment, text=True)
    return int(output)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_worker_takes_the_memory_of_a_step_from_the_step_before() -> None:
    assert page_faults_of_a_step() < 100  # of 16,384 pages of 4 KiB


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_users_own_settings_of_malloc_stand() -> None:
    returned = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert page_faults_of_a_step(**returned) >= 16 * 4 * 2**20 // 2**21  # even with huge pages of 2 MiB


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with torch_threads(None):
        assert torch.get_num_threads() == before


V1, V2 = "9:name=systemd:/x\n5:cpu,cpuacct:/job/step\n4:memory:/job/step\n0::/x\n", "0::/user.slice/job.scope\n"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        (V2, {}, 64),
        (V2, {"user.slice/job.scope/cpu.max": "50000 100000"}, 1),
        (V2, {"user.slice/job.scope/cpu.max": "max 100000", "user.slice/cpu.max": "200000 100000"}, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        (V1, {"cpu/job/step/cpu.cfs_quota_us": "50000", "cpu/job/step/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_a_share_of_the_cores_counts_of_every_control_group_around_the_process(
    own: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_groups(own, files, tmp_path, monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("own", "files", "bytes_usable"),
    [
        (V2, {}, None),
        (V2, {"user.slice/job.scope/memory.max": "1048576", "user.slice/memory.max": "2097152"}, 1 << 20),
        (V2, {"user.slice/job.scope/memory.max": "max", "user.slice/memory.max": "1048576"}, 1 << 20),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        (V1, {"memory/job/step/memory.limit_in_bytes": "1048576"}, 1 << 20),
    ],
)
def test_a_limit_of_memory_counts_of_every_control_group_around_the_process(
    own: str, files: dict[str, str], bytes_usable: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_groups(own, files, tmp_path, monkeypatch)
    monkeypatch.setattr(cpu, "MEMORY_FACTS", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert usable_memory() == (bytes_usable or machine)
    assert free_memory() == (bytes_usable or 3000 * 1024)


def test_the_limit_of_this_machine_s_own_control_groups_is_seen() -> None:
    with memory_limit(64 << 20) as group:
        code = f"open('{group}/cgroup.procs', 'w').write('0'); from gpipe_cli.cpu import *; print(usable_memory())"
        assert int(subprocess.check_output([sys.executable, "-c", code])) == 64 << 20


def imitate_groups(own: str, files: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes limits, by their place below /sys/fs/cgroup; ``own`` is the content of /proc/self/cgroup."""
    for name, text in {"own": own, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(cpu, "CGROUPS", folder)
    monkeypatch.setattr(cpu, "OWN_CGROUPS", folder / "own")
