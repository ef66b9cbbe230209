"""Gives the tests a home folder of their own, and leaves out slow ones unless they are asked for."""

import os
import signal
import site
import tempfile

import pytest

# Each of these would lead past HOME to a cache or to settings of the person who runs the tests.
PAST_HOME = ("GPIPE_CACHE", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")


def pytest_configure(config: pytest.Config) -> None:
    """Makes an empty HOME for the session; xdist's workers and every process of a test inherit it with its caches.

    Where signals are ignored (nohup, cron, `make test &` in a script), the processes of tests would ignore them, too.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
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
    parser.addoption("--slow", action="count", default=0, help="run slow tests too (as SLOW=1); twice: all (SLOW=2)")


def pytest_report_header(config: pytest.Config) -> str | None:
    left_out = {0: "slow tests are left out: make test SLOW=1, or pytest --slow", 1: "SLOW=2 runs some tests more"}
    return left_out.get(_level(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    level = _level(config)
    left_out = [item for item in items if _slowness(item) > level]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _slowness(item: pytest.Item) -> int:
    """Returns 0 for a fast test, the argument of its mark `slow` (1 if it has none) for a slow one."""
    marks = [mark.args[0] if mark.args else 1 for mark in item.iter_markers("slow")]
    return max(marks, default=0)


def _level(config: pytest.Config) -> int:
    """Returns how slow the tests may be that run: as --slow says; any, if a test or the mark is named."""
    named = any("::" in word for word in config.args) or "slow" in config.getoption("-m")
    return 2 if named else int(config.getoption("--slow"))
