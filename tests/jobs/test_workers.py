"""Tests the number of workers that a run gets, and which GPUs count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from composed import checked, composed

from gpipe_cli import gpus
from gpipe_cli.config import PipelineConfig
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import machine as this_machine
from gpipe_cli.jobs.machine import choose_workers

PIPELINE = PipelineConfig(**{**composed()["pipeline"], "K": 16, "cost": "flops", "threads": 1}, auto=[])


@pytest.mark.parametrize(
    ("changes", "machine", "workers", "line"),
    [
        ({}, (0, 2), 2, "16 cells on 2 workers (2 cores)"),
        ({"K": 4}, (8, 2), 4, "4 cells on 4 workers (8 GPUs)"),
        ({"replicas": 4}, (8, 2), 2, "16 cells on 2 workers × 4 replicas (8 GPUs)"),
        ({"replicas": 4}, (0, 2), 1, "16 cells on 1 worker × 4 replicas (2 cores)"),
        ({"threads": 4}, (0, 8), 2, "16 cells on 2 workers (8 cores)"),
        ({"workers": 16}, (0, 2), 16, "16 cells on 16 workers (pipeline.workers=16)"),
        ({"schedule": "interleaved_1f1b"}, (0, 7), 4, "16 cells on 4 workers (7 cores)"),
    ],
)
def test_workers_follow_the_devices(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], machine: tuple[int, int], workers: int, line: str
) -> None:
    monkeypatch.setattr(this_machine, "count_gpus", lambda: machine[0])
    monkeypatch.setattr(this_machine, "usable_cores", lambda: machine[1])
    assert choose_workers(replace(PIPELINE, **changes), inline=False, world_size=None) == (workers, line)


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({"workers": 3}, 4, "WORLD_SIZE=4 does not fit pipeline.workers=3"),
        ({"replicas": 3}, 4, "pipeline.replicas=3 and pipeline.K=16"),
        ({"K": 2}, 4, "start torchrun with pipeline.replicas times 1 to 2 processes$"),
        ({"schedule": "interleaved_1f1b"}, 3, "a number that divides pipeline.K"),
    ],
)
def test_a_job_of_the_wrong_size_is_refused(changes: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose_workers(replace(PIPELINE, **changes), inline=False, world_size=world_size)


def test_nccl_on_cpus_is_refused_also_for_one_worker() -> None:
    with pytest.raises(ConfigurationError, match=r"use pipeline\.backend=auto$") as refused:
        checked("debug=tiny", "pipeline.backend=nccl", "pipeline.device=cpu", "pipeline.workers=1")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("visible", "number"),
    [("0,1", 2), ("", 0), ("-1", 0), ("2", 1), ("0,1,2,3,4,5", 4), ("7", 0), ("NoDevFiles", 0), ("GPU-a,MIG-b", 2)],
)
def test_gpus_are_those_that_cuda_programs_see(visible: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NoDevFiles is what Slurm gives to a job without GPUs; a worker would take one more for a driver that fails."""
    monkeypatch.setattr(gpus, "_installed_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.count_gpus() == number
