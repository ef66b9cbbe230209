"""Tests that processes use the CPU as promised: cores, threads, memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gpipe_cli import cpu
from gpipe_cli.cpu import as_worker, free_memory, usable_cores, usable_memory


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with as_worker(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with as_worker(None):
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


def imitate_groups(own: str, files: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes limits, by their place below /sys/fs/cgroup; ``own`` is the content of /proc/self/cgroup."""
    for name, text in {"own": own, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(cpu, "CGROUPS", folder)
    monkeypatch.setattr(cpu, "OWN_CGROUPS", folder / "own")
