"""Tests that processes use the CPU as promised: cores, threads, freed memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "350000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
    ids=["none", "2 without limit", "2", "2 below one", "1 without limit", "1"],
)
def test_a_container_s_share_counts_in_both_versions_of_cgroups(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path, files)
    monkeypatch.setattr(cpu, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("files", "bytes_usable"),
    [
        ({}, None),
        ({"memory.max": "max"}, None),
        ({"memory.max": "1048576"}, 1 << 20),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ({"memory/memory.limit_in_bytes": "1048576"}, 1 << 20),
    ],
    ids=["none", "2 without limit", "2", "1 without limit", "1"],
)
def test_a_container_s_memory_counts_in_both_versions_of_cgroups(
    files: dict[str, str], bytes_usable: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path, files)
    monkeypatch.setattr(cpu, "CGROUPS", tmp_path)
    monkeypatch.setattr(cpu, "MEMORY_FACTS", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert usable_memory() == (bytes_usable or machine)
    assert free_memory() == (bytes_usable or 3000 * 1024)


def test_where_the_system_does_not_tell_what_is_free_all_of_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "MEMORY_FACTS", tmp_path / "no such file")
    assert free_memory() == usable_memory()


def write_all(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text}\n")
