"""Tests that processes use the CPU as promised: cores, threads, memory."""

import os
from pathlib import Path

import pytest

from gpipe_cli import cpu
from gpipe_cli.cpu import free_memory, usable_cores, usable_memory

V1, V2 = "9:name=systemd:/x\n5:cpu,cpuacct:/job/step\n4:memory:/job/step\n0::/x\n", "0::/user.slice/job.scope\n"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("own", "files", "cores", "most"),
    [
        (V2, {}, 64, None),
        (V2, {"user.slice/job.scope/cpu.max": "50000 100000"}, 1, None),
        (V2, {"user.slice/job.scope/cpu.max": "max 100000", "user.slice/cpu.max": "200000 100000"}, 2, None),
        (V2, {"user.slice/job.scope/memory.max": f"{MIB}", "user.slice/memory.max": f"{2 * MIB}"}, 64, MIB),
        (V2, {"user.slice/job.scope/memory.max": "max", "user.slice/memory.max": f"{MIB}"}, 64, MIB),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64, None),
        (V1, {"cpu/job/step/cpu.cfs_quota_us": "50000", "cpu/job/step/cpu.cfs_period_us": "100000"}, 1, None),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, 64, None),
        (V1, {"memory/job/step/memory.limit_in_bytes": f"{MIB}"}, 64, MIB),
    ],
)
def test_limits_of_cores_and_memory_count_of_every_control_group_around_the_process(
    own: str, files: dict[str, str], cores: int, most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = "MemTotal: 4000 kB\nMemAvailable: 3000 kB"
    for name, text in {"own": own, "meminfo": memory, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(cpu, "CGROUPS", tmp_path)
    monkeypatch.setattr(cpu, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(cpu, "MEMORY_FACTS", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    assert usable_cores() == cores
    assert usable_memory() == (most or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    assert free_memory() == (most or 3000 * 1024)
