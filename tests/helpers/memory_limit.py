"""Limits the memory of processes by a control group; tests of that are skipped where it is not allowed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup")
KINDS = ((GROUPS / "memory", "memory.limit_in_bytes"), (GROUPS, "memory.max"))  # of version 1 and of version 2


@contextmanager
def memory_limit(size: int) -> Iterator[Path]:
    """Makes a group that may use ``size`` bytes; a process joins by writing its id into the file `cgroup.procs`."""
    for home, limit in KINDS:
        group = home / f"gpipe_test_{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(size))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("this process may not limit memory by a control group")
