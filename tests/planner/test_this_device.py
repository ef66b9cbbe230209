"""What a plan takes the present machine's GPUs for. There is none here: torch.cuda answers as the test says."""

from __future__ import annotations

import time

import pytest
import torch
from own_plan import OWN, SleepingTask

from gpipe_cli.commands.plan import make_request
from gpipe_cli.config import PipelineConfig
from gpipe_cli.planner import planner
from gpipe_cli.planner.devices import PRESETS, Device
from gpipe_cli.planner.measure import measurement, this_device
from gpipe_cli.planner.measure.link import LinkTimes
from gpipe_cli.planner.planner import Planner

FREE, TOTAL = 30e9, 80e9
WHOLE = PRESETS["h100"]
GLOO = LinkTimes(host=1e-3, latency=2e-3, rate=3e6)
SHARED = LinkTimes(host=5e-4, latency=2e-3, rate=3e6)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(device: torch.device, memory: float, link: LinkTimes) -> Device:
        figures = {"link": link.rate, "latency": link.latency, "host": link.host}
        return Device("GPU", WHOLE.flops, WHOLE.half_flops, memory, WHOLE.bandwidth, **figures)

    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (FREE, TOTAL))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(this_device, "_measure", whole)
    monkeypatch.setattr(this_device, "link_between_processes", lambda shared: SHARED if shared else GLOO)


def pipeline(*words: str) -> PipelineConfig:
    return make_request(["pipeline.K=4", *words]).settings.pipeline


@pytest.mark.parametrize(("workers", "replicas", "sharing"), [(2, 1, 1), (3, 1, 2), (4, 1, 2), (2, 3, 3)])
def test_workers_share_the_memory_that_is_free_and_the_rates(
    workers: int, replicas: int, sharing: int, two_gpus: None
) -> None:
    found = this_device.measure_device(pipeline(f"pipeline.workers={workers}", f"pipeline.replicas={replicas}"))
    assert found.memory == FREE / sharing
    assert (found.flops, found.half_flops) == (WHOLE.flops / sharing, WHOLE.half_flops / sharing)
    assert found.bandwidth == WHOLE.bandwidth / sharing


@pytest.mark.parametrize(
    ("words", "link"),
    [
        (["pipeline.workers=2"], this_device._GPU_LINK),
        (["pipeline.workers=4"], SHARED),
        (["pipeline.workers=2", "pipeline.backend=gloo"], GLOO),
    ],
)
def test_messages_go_through_the_cpu_where_nccl_carries_none(words: list[str], link: LinkTimes, two_gpus: None) -> None:
    found = this_device.measure_device(pipeline(*words))
    assert (found.host, found.latency, found.link) == link


@pytest.mark.parametrize(
    ("environment", "sharing"),
    [
        pytest.param({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 1, id="two machines"),
        pytest.param({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 2, id="one machine"),
        pytest.param({"WORLD_SIZE": "4"}, 1, id="a launcher that may have given each its GPU"),
    ],
)
def test_only_workers_of_this_machine_share_its_gpus(
    environment: dict[str, str], sharing: int, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert this_device.workers_on_a_gpu(pipeline("pipeline.workers=4")) == sharing


def test_workers_of_a_cpu_share_no_gpu(two_gpus: None) -> None:
    assert this_device.workers_on_a_gpu(pipeline("pipeline.workers=4", "pipeline.device=cpu")) == 1


def test_what_is_timed_on_a_gpu_alone_takes_longer_where_it_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU at hand stands for a GPU of a hundred workers."""
    monkeypatch.setattr(measurement, "workers_on_a_gpu", lambda pipeline: 100)
    monkeypatch.setattr(planner, "measure_device", lambda pipeline: WHOLE)
    words = [*OWN[:-1], "plan.device=this", "pipeline.K=1", "pipeline.M=1", "task._target_=own_plan.SleepingTask"]
    request = make_request(words)
    made = Planner(request.settings, request.options).plan()
    assert made.cells[0].forward_seconds >= 100 * SleepingTask.SECONDS
    assert made.notes == ["100 workers share a GPU of this machine: each has that part of its memory and speed"]


def test_starting_an_operation_is_timed_without_waiting_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here an operation costs nothing and waiting for the GPU 2 ms: of that next to nothing is an operation's."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.002))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(this_device, "_SECONDS", 0.01)
    small = torch.zeros(8)
    for name in ("randn", "zeros", "randn_like"):
        monkeypatch.setattr(torch, name, lambda *_, **__: small)
    monkeypatch.setattr(torch, "mm", lambda *_: small)
    found = this_device._measure(torch.device("cuda"), 1.0, GLOO)
    assert found.overhead < 0.0005
