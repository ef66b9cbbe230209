"""Gives the tests a home folder of their own and leaves the slow ones out unless they are asked for."""

from __future__ import annotations

import os
import site
import tempfile

import pytest

# Each of these would lead past HOME to a cache or to settings of the person who runs the tests.
PAST_HOME = ("GPIPE_CACHE", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")


def pytest_configure(config: pytest.Config) -> None:
    """Makes an empty HOME for the session; xdist's workers and every process of a test inherit it with its caches."""
    if hasattr(config, "workerinput"):
        return
    home = tempfile.TemporaryDirectory(prefix="gpipe-tests-home-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    os.environ["PYTHONUSERBASE"] = site.getuserbase()  # packages of `pip install --user` stay importable
    os.environ["HOME"] = home.name
    for name in PAST_HOME:
        os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = "1"  # two tests at a time on two cores: threads of both would wait for each other


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
    """Returns whether slow tests run: --slow is given, or a test or the mark is named."""
    named = any("::" in word for word in config.args) or "slow" in config.getoption("-m")
    return named or bool(config.getoption("--slow"))
