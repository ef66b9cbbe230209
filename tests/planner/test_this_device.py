"""Tests plans of the present machine; without a GPU here, its figures are given."""

from __future__ import annotations

import pytest

from gpipe_cli.commands.plan import make_request
from gpipe_cli.config import PipelineConfig
from gpipe_cli.planner.measure import this_device
from gpipe_cli.planner.measure.this_device import workers_per_gpu


def pipeline(*words: str) -> PipelineConfig:
    return make_request(["pipeline.K=4", *words]).settings.pipeline


@pytest.mark.parametrize(
    ("workers", "environment", "sharing"),
    [
        pytest.param(2, {}, 1, id="as many as GPUs"),
        pytest.param(3, {}, 2, id="one more"),
        pytest.param(6, {}, 3, id="three each"),
        pytest.param(4, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 1, id="two machines"),
        pytest.param(4, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 2, id="one machine"),
        pytest.param(4, {"WORLD_SIZE": "4"}, 1, id="a launcher that may have given each its GPU"),
    ],
)
def test_only_workers_of_this_machine_share_its_two_gpus(
    workers: int, environment: dict[str, str], sharing: int
) -> None:
    assert workers_per_gpu(workers, 2, environment) == sharing


def test_workers_of_a_cpu_share_no_gpu() -> None:
    assert this_device.workers_on_a_gpu(pipeline("pipeline.workers=4", "pipeline.device=cpu")) == 1
