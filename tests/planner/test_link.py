"""Tests the measurement of messages between the workers of this machine."""

from __future__ import annotations

import pytest

from gpipe_cli.commands.plan import make_request
from gpipe_cli.planner.measure import this_device
from gpipe_cli.planner.measure.link import LinkTimes, link_between_processes

FOUND = LinkTimes(host=1e-3, latency=2e-3, rate=3e6)


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False])
def test_it_is_measured_between_two_processes(shared_memory: bool) -> None:
    found = link_between_processes(shared_memory)
    assert found is not None
    assert 0 < found.host < 0.1
    assert 0 <= found.latency < 0.1
    assert found.rate > 1e6


@pytest.mark.parametrize(("K", "measured"), [(1, None), (2, None), (2, FOUND)])
def test_this_device_has_the_link_that_was_found(
    K: int, measured: LinkTimes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def answer(shared_memory: bool) -> LinkTimes | None:
        asked.append(shared_memory)
        return measured

    monkeypatch.setattr(this_device, "link_between_processes", answer)
    monkeypatch.setattr(this_device, "_SECONDS", 0.01)
    device = this_device.measure_device(make_request([f"pipeline.K={K}", "pipeline.device=cpu"]).settings.pipeline)
    expected = measured or this_device._CPU_LINK
    assert (device.host, device.latency, device.link) == expected
    assert asked == [True] * (K > 1)  # one worker sends nothing
