"""Tests plans of the present machine; without a GPU here, its figures are given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composed import checked
from own_plan import EVEN, ZEROS, planned

from gpipe_cli.planner import planner
from gpipe_cli.planner.measure.this_device import workers_on_a_gpu
from gpipe_cli.planner.options import peak_flops
from gpipe_cli.trainer import assembly

OWN_TASK = "task._target_=own_plan.OwnTask"


@pytest.mark.parametrize(
    ("workers", "environment", "sharing"),
    [
        pytest.param(2, {}, 1, id="as many as GPUs"),
        pytest.param(3, {}, 2, id="one more"),
        pytest.param(4, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 1, id="two machines"),
        pytest.param(4, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 2, id="one machine"),
        pytest.param(4, {"WORLD_SIZE": "4"}, 1, id="a launcher that may have given each its GPU"),
    ],
)
def test_only_workers_of_this_machine_share_its_gpus(
    workers: int, environment: dict[str, str], sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert workers_on_a_gpu(checked().settings.pipeline, workers) == sharing


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA A100-SXM4-80GB", [19.5e12, 312e12]),
        ("NVIDIA H100 80GB HBM3", [67e12, 989e12]),
        ("NVIDIA H100 PCIe", [51e12, 756e12]),
        ("NVIDIA L40S", [91.6e12, 362e12]),
        ("Tesla P40", [12e12, None]),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", [None, None]),
        ("NVIDIA A10G", [None, None]),
    ],
)
def test_a_card_s_peak_is_known_by_torch_s_name_for_it(name: str, peaks: list[float | None]) -> None:
    assert [peak_flops(name, half) for half in (False, True)] == peaks


def test_each_gpu_s_free_memory_counts_once_communicators_exist_with_room_for_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, groups = [10e9, 8e9, 9e9, 12e9], set[int]()  # two replicas of two workers
    charge = 1e9  # of a GPU for a communicator

    def world(rank: int) -> Any:
        def read(_: Any) -> float:
            return free[rank] - charge * len(groups)

        def gathered(own: float) -> list[float]:
            assert own == read(None)
            return [each - charge * len(groups) for each in free]

        monkeypatch.setattr(assembly, "free_memory_of_gpu", read)
        device = torch.device("cpu")
        return SimpleNamespace(
            workers=2, size=4, device=device, wire=device, replica_group=object(), all_gather=gathered
        )

    monkeypatch.setattr(assembly, "GPU", "cpu")
    monkeypatch.setattr(assembly, "make_transport", lambda *_: groups.add(1))
    monkeypatch.setattr(assembly, "sum_over_replicas", lambda *_: groups.add(2))
    settings = checked("pipeline.K=2", "pipeline.workers=2", "pipeline.replicas=2").settings
    expected = [0.95 * (9e9 - 2 * charge) - 0.3e9, 0.95 * (8e9 - 2 * charge) - 0.3e9]
    assert assembly.memory_of_workers(settings, world(0)) == pytest.approx(expected)


def test_a_step_planned_for_this_machine_contains_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "update_seconds", lambda settings: lambda name, shape: float(shape.numel))
    made = planned(EVEN, *ZEROS, OWN_TASK, "plan.device=this", "pipeline.K=1", "pipeline.workers=1")
    assert made.update_seconds == made.parameters == 8 * (64 * 64 + 64)
    assert made.step_seconds == made.timeline.span + made.update_seconds
