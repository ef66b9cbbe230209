"""Opens the data source on the workers that read it: prepares it in turn, forwards its warnings, counts its defects."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..config import Settings
from ..data.source import Report, Source, no_report
from ..distributed.exchange import Exchange
from ..distributed.world import World
from ..errors import PlainError
from ..factory.build import build_source
from ..metrics.journal import Notices

PREPARATION_TIMEOUT = timedelta(days=365)


def open_source(
    settings: Settings,
    world: World,
    journal: Notices,
    stop_requested: Callable[[], bool],
    emit: Callable[[dict[str, Any]], None],
) -> Source | None:
    """Makes and prepares the data source; every worker calls it at the same time.

    Its warnings are shown on the console: while it prepares, those of rank 0 only, because the other readers find the
    same; later, those of every reader.

    Args:
        emit: passes an event to the console.

    Returns:
        The source on the first worker of each replica, None elsewhere.

    Raises:
        ConfigurationError: it cannot be made, or does not count the epochs that `trainer.epochs` limits.
        PlainError: the run was asked to stop. The next run continues with what is prepared.
    """
    source = build_source(settings.data, settings.seed, settings.task) if world.reads_data else None

    def report(text: str, done: int, total: int) -> None:
        if stop_requested():
            raise PlainError("ended while the data were prepared: what is finished is kept for the next run")
        journal.preparation(text, done, total)

    if source is not None and world.rank == 0:
        forward_warnings(source, emit)
    prepare_in_turn(source, world, report)
    if source is not None:
        forward_warnings(source, emit)
        if settings.trainer.epochs is not None:
            source.epoch(None)  # refused by a source that does not count them
    return source


def prepare_in_turn(source: Source | None, world: World, report: Report) -> None:
    """Prepares the source on rank 0, then on the other workers that read data; every worker calls it.

    The others find it prepared, unless their machine shares no disk with rank 0's.

    Args:
        source: None on workers that do not read data.
        report: receives rank 0's progress.
    """
    if source is not None and world.rank == 0:
        source.prepare(report)
    wait_for_all(world)
    if source is not None and world.rank != 0:
        source.prepare(no_report)
    wait_for_all(world)


def wait_for_all(world: World) -> None:
    """Returns when every worker has called it, even hours later: a large corpus takes longer than a message may.

    Uses point-to-point messages, because gloo's collectives take only the group's timeout (`GROUP_TIMEOUT_SECONDS`).
    A worker that dies is still noticed at once, by its closed connections.
    """
    Exchange({"here": 1}, world.all_ranks).run(PREPARATION_TIMEOUT)


class _ToConsole(logging.Handler):
    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        self._emit({"kind": "warning", "text": record.getMessage()})
        record.shown = True  # the console may listen in this process, too (launch.inline)


def forward_warnings(source: Source, emit: Callable[[dict[str, Any]], None]) -> None:
    """Shows the warnings that the source's package logs, from any thread, on the console."""
    package = type(source).__module__.rpartition(".")[0] or type(source).__module__
    logger = logging.getLogger(package)
    # Those of an earlier run in this process go.
    logger.handlers = [*(one for one in logger.handlers if not isinstance(one, _ToConsole)), _ToConsole(emit)]


def count_defects(world: World, source: Source | None) -> dict[str, int]:
    """Returns the sum of rank 0's ``prepared_defects`` and every source's ``defects``.

    Every worker calls it at the same time.
    """
    own = Counter[str]()
    if source is not None:
        own.update(source.defects)
        own.update(source.prepared_defects if world.rank == 0 else {})
    total = sum(map(Counter, world.all_gather(dict(own))), Counter[str]())
    return dict(total)
