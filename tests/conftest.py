"""Slow tests are left out. Most make a promise once more: at another K, on another schedule, by torchrun."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too (make test SLOW=1)")


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if _runs_slow(config) else "slow tests are left out: make test SLOW=1, or pytest --slow"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _runs_slow(config):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def _runs_slow(config: pytest.Config) -> bool:
    """Who names a test, or the mark, wants to see it run."""
    named = any("::" in word for word in config.args) or "slow" in config.getoption("-m")
    return named or bool(config.getoption("--slow"))
