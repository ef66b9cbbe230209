"""What a data source has to say while it is read: its warnings reach the console, its counts the summary."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..data.source import Source
from ..distributed.world import World


class _ToConsole(logging.Handler):
    """Hands what is logged to the console of the command."""

    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        self._emit({"kind": "warning", "text": record.getMessage()})


def forward_warnings(source: Source, emit: Callable[[dict[str, Any]], None]) -> None:
    """Shows on the console what the module of ``source`` (or another of its package) logs as a warning.

    Sources know nothing of consoles; they log, from whatever thread, as any library does.
    """
    package = type(source).__module__.rpartition(".")[0] or type(source).__module__
    logger = logging.getLogger("gpipe_cli.data" if package.startswith("gpipe_cli.data") else package)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _ToConsole)]:
        logger.removeHandler(handler)  # of an earlier run in this process
    logger.addHandler(_ToConsole(emit))


def count_defects(world: World, source: Source | None) -> dict[str, int]:
    """What sources counted as broken, left out or replaced (their optional ``defects``), summed over the replicas.

    Every worker calls it at the same time.
    """
    mine = dict(getattr(source, "defects", {}))
    total: Counter[str] = Counter()
    for defects in world.all_gather(mine):
        total.update(defects)
    return dict(total)
